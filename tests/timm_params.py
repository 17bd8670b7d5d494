"""Converts parameters of a timm Vision Transformer to this package's names."""

import numpy as np

OUTER = {
  'patch_embed.proj.bias': 'embedding/bias',
  'cls_token': 'cls',
  'dist_token': 'distillation',
  'reg_token': 'registers',
  'pos_embed': 'position/embedding',
  'norm.weight': 'encoder/norm/scale',
  'norm.bias': 'encoder/norm/bias',
  'fc_norm.weight': 'fc_norm/scale',
  'fc_norm.bias': 'fc_norm/bias',
  'head.bias': 'head/bias',
  'head_dist.bias': 'head_distillation/bias',
}
INNER = {
  'norm1.weight': 'norm1/scale',
  'norm1.bias': 'norm1/bias',
  'norm2.weight': 'norm2/scale',
  'norm2.bias': 'norm2/bias',
  'attn.q_norm.weight': 'attention/query_norm/scale',
  'attn.q_norm.bias': 'attention/query_norm/bias',
  'attn.k_norm.weight': 'attention/key_norm/scale',
  'attn.k_norm.bias': 'attention/key_norm/bias',
  'attn.proj.bias': 'attention/out/bias',
  'mlp.fc2.bias': 'mlp/fc2/bias',
  'ls1.gamma': 'scale1',
  'ls2.gamma': 'scale2',
  'gamma_1': 'scale1',
  'gamma_2': 'scale2',
}


def ours(theirs, model):
  """Returns {path: array} from {timm's name: array} (values or gradients).

  Args:
    theirs: NumPy arrays by timm's names.
    model: our model, for its sizes.
  """
  flat = {new: theirs[old] for old, new in OUTER.items() if old in theirs}
  kernel = theirs['patch_embed.proj.weight']  # [d, 3, p, p]
  flat['embedding/kernel'] = kernel.transpose(2, 3, 1, 0)
  for old, new in (('head', 'head'), ('head_dist', 'head_distillation')):
    if f'{old}.weight' in theirs:
      flat[f'{new}/kernel'] = theirs[f'{old}.weight'].T
  layers = [_layer(theirs, f'blocks.{i}.', model) for i in range(model.depth)]
  for name in layers[0]:
    flat[f'encoder/layers/{name}'] = np.stack([each[name] for each in layers])
  return flat


def _layer(theirs, start, model):
  d, heads = model.width, (model.num_heads, model.width // model.num_heads)
  theirs = {
    name.removeprefix(start): array
    for name, array in theirs.items()
    if name.startswith(start)
  }
  flat = {new: theirs[old] for old, new in INNER.items() if old in theirs}
  bias = theirs.get('attn.qkv.bias')
  if bias is None:  # Eva's keys do not have a bias
    query, value = theirs['attn.q_bias'], theirs['attn.v_bias']
    bias = np.concatenate([query, 0 * query, value])
  weights = theirs['attn.qkv.weight'].reshape(3, *heads, d)
  for i, name in enumerate(('query', 'key', 'value')):
    flat[f'attention/{name}/kernel'] = weights[i].transpose(2, 0, 1)
    flat[f'attention/{name}/bias'] = bias.reshape(3, *heads)[i]
  flat['attention/out/kernel'] = theirs['attn.proj.weight'].T.reshape(*heads, d)
  units = (2, model.mlp_dim) if model.gated else (model.mlp_dim,)
  flat['mlp/fc1/kernel'] = theirs['mlp.fc1.weight'].T.reshape(d, *units)
  flat['mlp/fc1/bias'] = theirs['mlp.fc1.bias'].reshape(units)
  flat['mlp/fc2/kernel'] = theirs['mlp.fc2.weight'].T
  return flat
