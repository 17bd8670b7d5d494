"""Tests of options of the Vision Transformer against timm's models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import timm_params
import torch
from tiny_vit import abstract, images_of

from benchmarks.peers import import_timm
from tests.faults.counts import further
from vit_jax.arrays import tree
from vit_jax.models.vit import Model

import_timm()
from timm.layers import LayerNorm, SwiGLUPacked  # noqa: E402
from timm.models.deit import VisionTransformerDistilled  # noqa: E402
from timm.models.eva import Eva  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

SIZE = (12, 16)
SIZES = dict(
  patch_size=4, width=32, depth=2, mlp_dim=64, num_heads=2, dtype='float32'
)
THEIRS = dict(
  img_size=SIZE,
  patch_size=4,
  embed_dim=32,
  depth=2,
  num_heads=2,
  mlp_ratio=2,
  num_classes=5,
)
# name: (class and options of timm, options of ours)
CASES = {
  'registers, layer_scale, gated': (
    functools.partial(
      VisionTransformer,
      reg_tokens=3,
      no_embed_class=True,
      init_values=0.1,
      mlp_layer=SwiGLUPacked,
      act_layer=torch.nn.SiLU,
      mlp_ratio=4,
    ),
    dict(registers=3, prefix_positions=False, layer_scale=1e-4, gated=True),
  ),
  'gap, qk_norm, norm_eps': (
    functools.partial(
      VisionTransformer,
      class_token=False,
      global_pool='avg',
      fc_norm=False,
      reg_tokens=1,
      qk_norm=True,
      norm_layer=functools.partial(LayerNorm, eps=1e-2),
    ),
    dict(pool='gap', registers=1, qk_norm=True, norm_eps=1e-2),
  ),
  'fc_norm': (
    functools.partial(VisionTransformer, global_pool='avg', reg_tokens=2),
    dict(fc_norm=True, registers=2),
  ),
  'distilled': (
    functools.partial(VisionTransformerDistilled),
    dict(distilled=True),
  ),
  'rope2d': (
    functools.partial(
      Eva,
      use_abs_pos_emb=False,
      use_rot_pos_emb=True,
      rope_type='dinov3',
      rope_temperature=100.0,
      rope_rotate_half=True,
      global_pool='token',
      num_reg_tokens=2,
      init_values=0.1,
      norm_layer=functools.partial(LayerNorm, eps=1e-5),
    ),
    dict(position='rope2d', registers=2, layer_scale=1e-5, norm_eps=1e-5),
  ),
}


def their_results(model, images):
  """Returns logits, outputs of blocks and gradients for random parameters."""
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.normal_(0, 0.3, generator=generator)
  blocks = []
  for block in model.blocks:
    block.register_forward_hook(lambda *args: blocks.append(args[2]))
  model.eval()
  logits = model(torch.tensor(np.asarray(images)).permute(0, 3, 1, 2))
  logits.backward(torch.cos(torch.arange(logits.numel())).reshape(logits.shape))
  named = dict(model.named_parameters())
  return (
    logits.detach().numpy(),
    np.stack([block.detach().numpy() for block in blocks], axis=1),
    {name: p.detach().numpy() for name, p in named.items()},
    {name: p.grad.numpy() for name, p in named.items()},
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  'case',
  [
    'registers, layer_scale, gated',
    'gap, qk_norm, norm_eps',
    *further('fc_norm', 'distilled', 'rope2d'),
  ],
)
def test_options_equal_timm(case):
  """Logits, outputs of all layers and all gradients agree."""
  make, options = CASES[case]
  images = images_of(2, *SIZE)
  logits, layers, values, gradients = their_results(
    make.func(**THEIRS | make.keywords), images
  )
  model = Model(5, **SIZES, gelu='exact', **options)
  params = timm_params.ours(values, model)
  expected_shapes = tree.flatten(abstract(model, SIZE))
  assert {k: v.shape for k, v in params.items()} == {
    k: v.shape for k, v in expected_shapes.items()
  }

  @jax.jit
  def run(params):
    out = model.apply(
      {'params': params}, images, None, ('layers', 'heads'), method='predict'
    )
    y = out['logits']
    return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum(), out

  (_, out), found = jax.value_and_grad(run, has_aux=True)(
    tree.unflatten({k: jnp.array(v) for k, v in params.items()})
  )
  scale = max(1, np.abs(layers).max())
  np.testing.assert_allclose(out['layers'], layers, atol=1e-5 * scale)
  np.testing.assert_allclose(out['logits'], logits, atol=1e-4)
  np.testing.assert_allclose(out['heads'].mean(axis=1), logits, atol=1e-4)
  assert out['heads'].shape[1] == 1 + (case == 'distilled')
  expected = timm_params.ours(gradients, model)
  for path, gradient in tree.flatten(found).items():
    if path.endswith(('key/bias', 'key_norm/bias')):
      continue  # zero up to rounding, because it shifts all logits of a row
    size = np.abs(expected[path]).max()
    assert size > 0, path
    np.testing.assert_allclose(
      gradient, expected[path], atol=1e-4 * size, err_msg=path
    )


@pytest.mark.parametrize(
  'expected, variant, options',
  [
    (86_569_960, 'B/16', dict(registers=4, prefix_positions=False)),
    (87_338_192, 'B/16', dict(distilled=True)),  # DeiT-B distilled
    (22_436_432, 'S/16', dict(distilled=True)),
    (86_585_320, 'B/16', dict(layer_scale=1e-4, prefix_positions=False)),
    # DINOv2's largest at 518 px, without a head and its mask token
    (
      1_136_480_768 - 1536,
      'B/14',
      dict(width=1536, depth=40, num_heads=24, mlp_dim=4096)
      | dict(gated=True, layer_scale=1e-5),
    ),
  ],
)
def test_parameter_counts(expected, variant, options):
  """Counts are those of the public models."""
  dinov2 = 'gated' in options
  model = Model(0 if dinov2 else 1000, variant=variant, **options)
  side = 518 if dinov2 else 224
  assert tree.size(abstract(model, (side, side))) == expected


def test_the_architecture_builds_the_same_model():
  """`architecture` contains every option that fine-tuning reads."""
  options = dict(registers=2, layer_scale=0.1, qk_norm=True, norm_eps=1e-5)
  options |= dict(gated=True, distilled=True, gelu='exact')
  options |= dict(position='2d', position_at='layers')
  model = Model(5, **SIZES, **options)
  assert model.architecture.items() >= options.items()
  again = Model(5, **model.architecture, dtype='float32')
  assert again == model
