"""Models of other projects with random weights, and their results."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from benchmarks import peers
from vit_jax import load_pretrained
from vit_jax.arrays.pixels import NONE

torch = pytest.importorskip('torch')
timm = peers.import_timm()
transformers = pytest.importorskip('transformers')

WIDTH, DEPTH, HEADS = 32, 2, 4
SIZE, PATCH, CLASSES = 16, 4, 7


def noisy(model):
  """Returns the model with random weights of a useful scale, for evaluation."""
  generator = torch.Generator().manual_seed(0)
  with torch.no_grad():
    for parameter in model.parameters():
      noise = torch.randn(parameter.shape, generator=generator)
      parameter.add_(0.1 * noise)
  return model.eval()


def timm_vit(name='vit_base_patch16_224', **changes):
  """Returns a small model of one of timm's architectures."""
  sizes = dict(
    img_size=SIZE,
    patch_size=PATCH,
    embed_dim=WIDTH,
    depth=DEPTH,
    num_heads=HEADS,
    num_classes=CLASSES,
  )
  torch.manual_seed(0)
  return noisy(timm.create_model(name, **(sizes | changes)))


def timm_file(folder, model, config=None, name='model.safetensors'):
  """Writes a model's weights, optionally with a config.json next to them."""
  folder.mkdir(exist_ok=True)
  safetensors.numpy.save_file(state(model), folder / name)
  if config is not None:
    (folder / 'config.json').write_text(json.dumps(config))
  return str(folder / name)


def huggingface(kind='ViT', head='ForImageClassification', **changes):
  """Returns a small model of the library's class."""
  config = dict(
    image_size=SIZE,
    patch_size=PATCH,
    hidden_size=WIDTH,
    num_hidden_layers=DEPTH,
    num_attention_heads=HEADS,
    intermediate_size=2 * WIDTH,
    num_labels=CLASSES,
    layer_norm_eps=1e-6,
    attn_implementation='eager',
  )
  torch.manual_seed(0)
  config = getattr(transformers, f'{kind}Config')(**(config | changes))
  return noisy(getattr(transformers, f'{kind}{head}')(config))


def images(size=SIZE, n=3):
  """Returns images in [-1, 1]."""
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (n, size, size, 3)).astype(np.float32)


def run(model, images, mean=(0.5,) * 3, std=(0.5,) * 3):
  """Returns logits, and every block's output `[n, l, t, d]`.

  Images are in [-1, 1]. The model gets (u - mean) / std of pixels u in [0, 1].
  """
  pixels = ((images + 1) / 2 - np.array(mean)) / np.array(std)
  pixels = torch.from_numpy(pixels.transpose(0, 3, 1, 2).astype(np.float32))
  blocks = model.blocks if hasattr(model, 'blocks') else _layers(model)
  found = []
  hooks = [
    block.register_forward_hook(
      lambda _, __, out: found.append(out if torch.is_tensor(out) else out[0])
    )
    for block in blocks
  ]
  with torch.no_grad():
    out = model(pixels)
  for hook in hooks:
    hook.remove()
  logits = out if torch.is_tensor(out) else out.logits
  return logits.numpy(), torch.stack(found, dim=1).numpy()


def _layers(model):
  """Returns the encoder's layers of a Hugging Face model."""
  lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
  return next(each for each in lists if len(each) == DEPTH)


def state(model):
  """Returns {name: array} of a model."""
  return {k: v.numpy() for k, v in model.state_dict().items()}


def jitted(model):
  """Returns the compiled function from parameters and images to logits."""
  return jax.jit(lambda params, x: model.apply({'params': params}, x))


def same_results(path, reference, size, statistics=NONE, limit=1e-4, **keys):
  """Checks our results for images of a size against a function of pixels.

  Args:
    path: path of the weights.
    reference: function from pixels `[n, c, y, x]` to results.
    size: (height, width) of the images, to which our weights are resized.
    statistics: mean and std by which the pixels of `reference` are normalized.
    limit: largest difference, relative to the largest result.
    **keys: arguments of `load_pretrained`.
  """
  mean, std = (np.array(values) for values in statistics)
  x = np.random.default_rng(0).uniform(-1, 1, (3, *size, 3))
  pixels = (((x + 1) / 2 - mean) / std).transpose(0, 3, 1, 2)
  with torch.no_grad():
    expected = reference(torch.from_numpy(pixels.astype(np.float32)))
  expected = getattr(expected, 'logits', expected).numpy()
  model, params = load_pretrained(path, image_size=size, **keys)
  ours = jitted(model)(params, x.astype(np.float32))
  assert np.ptp(expected) > 0.1
  assert np.abs(ours - expected).max() <= limit * np.abs(expected).max()


def agree(model, params, reference, size=SIZE, **normalization):
  """Checks that logits and every block's output differ by at most 1e-4."""
  x = images(size)
  predict = jax.jit(
    lambda params: model.apply(
      {'params': params}, x, None, ('layers',), method='predict'
    )
  )
  ours = predict(params)
  logits, layers = run(reference, x, **normalization)
  assert np.ptp(logits) > 0.5
  np.testing.assert_allclose(ours['logits'], logits, atol=1e-4, rtol=0)
  np.testing.assert_allclose(ours['layers'], layers, atol=1e-4, rtol=0)
