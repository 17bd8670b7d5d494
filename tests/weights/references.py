"""Models of other projects with random weights, and their results."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from benchmarks import peers
from vit_jax import load_pretrained
from vit_jax.arrays.pixels import NONE
from vit_jax.models.swin import Swin

torch = pytest.importorskip('torch')
timm = peers.import_timm()
transformers = pytest.importorskip('transformers')

WIDTH, DEPTH, HEADS = 32, 2, 4
SIZE, PATCH, CLASSES = 16, 4, 7
# Keys of a config of transformers
SIZES = dict(
  image_size=SIZE,
  patch_size=PATCH,
  hidden_size=WIDTH,
  num_hidden_layers=DEPTH,
  num_attention_heads=HEADS,
  intermediate_size=2 * WIDTH,
)


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


def config_class(name):
  """Returns the class of the configs of a class of models of transformers."""
  for ending in ('Model', 'For'):
    name = name.partition(ending)[0] or name
  return getattr(transformers, f'{name}Config')


def huggingface(name='ViTForImageClassification', **changes):
  """Returns a small model of a class of transformers."""
  sizes = SIZES | dict(num_labels=CLASSES)
  if {'vision_config', 'embed_dim'} & changes.keys():  # has other keys
    sizes = {}
  torch.manual_seed(0)
  config = config_class(name)(**(sizes | changes))
  return noisy(getattr(transformers, name)(config))


def images(size=SIZE, n=3):
  """Returns images in [-1, 1]."""
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (n, size, size, 3)).astype(np.float32)


def state(model):
  """Returns {name: array} of a model."""
  return {k: v.numpy() for k, v in model.state_dict().items()}


def jitted(model):
  """Returns the compiled function from parameters and images to logits."""
  return jax.jit(lambda params, x: model.apply({'params': params}, x))


def same_results(
  weights, reference, size, statistics=NONE, limit=1e-4, blocks=None, **keys
):
  """Checks our results for images of a size against a function of pixels.

  Args:
    weights: path of the weights, or a model and its parameters.
    reference: function from pixels `[n, c, y, x]` to results.
    size: (height, width) of the images, to which our weights are resized.
    statistics: mean and std of each channel by which the pixels of `reference`
      are normalized.
    limit: largest difference, relative to the largest result.
    blocks: modules of the reference whose outputs are compared with those of
      our blocks; by default those of a model of timm.
    **keys: arguments of `load_pretrained`.
  """
  mean, std = (np.array(values) for values in statistics)
  x = np.random.default_rng(0).uniform(-1, 1, (3, *size, len(mean)))
  x = x.astype(np.float32)
  pixels = (((x + 1) / 2 - mean) / std).transpose(0, 3, 1, 2)
  outputs = []

  def keep(module, inputs, output):
    outputs.append(output[0] if isinstance(output, tuple) else output)

  blocks = getattr(reference, 'blocks', ()) if blocks is None else blocks
  hooks = [block.register_forward_hook(keep) for block in blocks]
  with torch.no_grad():
    expected = reference(torch.from_numpy(pixels.astype(np.float32)))
  for hook in hooks:
    hook.remove()
  theirs = [getattr(expected, 'logits', expected), *outputs]
  if isinstance(weights, str):
    weights = load_pretrained(weights, image_size=size, **keys)
  model, params = weights

  @jax.jit
  def results(params):
    variables = {'params': params}
    if not outputs:
      return [model.apply(variables, x)]
    if isinstance(model, Swin):
      stages = model.apply(variables, x, method='stages')
      layers = [stage[:, i] for stage in stages for i in range(stage.shape[1])]
      return [model.apply(variables, x), *layers]
    want = ('layers',)
    found = model.apply(variables, x, None, want, method='predict')
    return [found['logits'], *found['layers'].swapaxes(0, 1)]

  for ours, other in zip(results(params), theirs, strict=True):
    other = other.numpy().reshape(ours.shape)
    assert np.ptp(other) > 0.1
    assert np.abs(ours - other).max() <= limit * np.abs(other).max()
