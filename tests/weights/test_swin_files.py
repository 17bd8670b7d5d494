"""Tests of Swin Transformers against timm and Hugging Face."""

import json

import jax
import jax.numpy as jnp
import minimal_config
import numpy as np
import pytest
import safetensors.numpy
from references import timm, timm_file, torch, transformers

from tests.faults.counts import further
from vit_jax import finetune, load_pretrained
from vit_jax.arrays import sharding, tree
from vit_jax.arrays.pixels import IMAGENET
from vit_jax.errors import UserError
from vit_jax.models.contract import abstract_params
from vit_jax.models.swin import Model, resize_bias
from vit_jax.weights import pretrained, transfer
from vit_jax.weights.formats import swin

SIZES = dict(width=24, depths=(2, 2, 2), num_heads=2, window_size=4)
AUTHORS = dict(name='swin', dtype='float32', **SIZES)
TIMM = AUTHORS | dict(window_rule='timm')
HEADS = [2, 4, 8]
# Only atol is used, because activations are of order one to ten.
CLOSE = dict(rtol=0, atol=1e-4)
MEAN = (0.5, 0.5, 0.5)
PLAIN = dict(mean=[*MEAN], std=[*MEAN])  # nothing is folded


def randomize(model, scale=0.2):
  """Sets random parameters of a useful scale and the evaluation mode."""
  torch.manual_seed(0)
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      parameter.normal_(0, scale)
      if 'patch_embed' in name and 'proj' in name:
        parameter *= 0.01  # LayerNorm's ε matters if the variance is small
  return model.eval()


def timm_swin_transformer(image_size):
  model = timm.models.swin_transformer.SwinTransformer(
    img_size=image_size,
    patch_size=4,
    num_classes=7,
    embed_dim=SIZES['width'],
    depths=SIZES['depths'],
    num_heads=HEADS,
    window_size=SIZES['window_size'],
    drop_path_rate=0.0,
  )
  return randomize(model)


def hugging_face_swin(image_size):
  config = transformers.SwinConfig(
    image_size=image_size,
    patch_size=4,
    num_labels=7,
    embed_dim=SIZES['width'],
    depths=[*SIZES['depths']],
    num_heads=HEADS,
    window_size=SIZES['window_size'],
  )
  return randomize(transformers.SwinForImageClassification(config))


def saved_there(folder, model):
  """Writes a directory as the library does, for pixels in [-1, 1]."""
  model.save_pretrained(folder)
  settings = dict(image_mean=MEAN, image_std=MEAN, size=64, resample=3)
  (folder / 'preprocessor_config.json').write_text(json.dumps(settings))
  return str(folder)


def arrays_of(model):
  return {name: leaf.numpy() for name, leaf in model.state_dict().items()}


def images_of(height, width):
  rng = np.random.default_rng(0)
  return rng.uniform(-1, 1, (2, height, width, 3)).astype(np.float32)


def after_blocks(modules, model, images):
  """Returns logits, and the output of each module, of a torch model."""
  outputs = []

  def keep(module, inputs, output):
    outputs.append(output[0] if isinstance(output, tuple) else output)

  handles = [module.register_forward_hook(keep) for module in modules]
  with torch.no_grad():
    logits = model(torch.tensor(images).permute(0, 3, 1, 2))
  for handle in handles:
    handle.remove()
  return getattr(logits, 'logits', logits).numpy(), outputs


def check_all(model, params, images, logits, outputs):
  """Compares logits and every block's output."""

  @jax.jit
  def both(variables, images):
    stages = model.apply(variables, images, method='stages')
    return model.apply(variables, images), stages

  ours, stages = both({'params': params}, images)
  np.testing.assert_allclose(ours, logits, **CLOSE)
  blocks = [stage[:, i] for stage in stages for i in range(stage.shape[1])]
  assert len(blocks) == len(outputs) == 6
  for mine, output in zip(blocks, outputs, strict=True):
    np.testing.assert_allclose(
      mine, output.numpy().reshape(mine.shape), **CLOSE
    )


@pytest.mark.slow
@pytest.mark.parametrize(
  'size', [(76, 92), *further((48, 48), (24, 24), (68, 68))]
)
def test_timm_files_give_timms_results(tmp_path, size):
  """Maps that windows fill, do not fill, and small ones.

  At 48 pixels, the second map is 6x6, padded to 8x8. At 24, the second is 3x3,
  smaller than a window, and the third is 2x2, from an odd map. At 68 and at
  76x92 it matters that timm pads after the shift.
  """
  theirs = timm_swin_transformer(size)
  config = dict(
    architecture='swin_tiny',
    pretrained_cfg=dict(input_size=(3, *size), **PLAIN),
  )
  source = pretrained.find(timm_file(tmp_path, theirs, config))
  assert source.about['model'] == TIMM
  assert source.image_size == size
  model, params = load_pretrained(source.path)
  images = images_of(*size)
  blocks = [block for stage in theirs.layers for block in stage.blocks]
  check_all(model, params, images, *after_blocks(blocks, theirs, images))


@pytest.mark.slow
def test_window_rule_is_kept_in_conversion(tmp_path):
  """timm's rule survives conversion; other files follow the authors' rule."""
  theirs = timm_swin_transformer(64)
  size = 68  # 17 tokens a side, in windows of four
  large = timm_swin_transformer(size)
  large.load_state_dict(theirs.state_dict())
  images = images_of(size, size)
  with torch.no_grad():
    logits = large(torch.tensor(images).permute(0, 3, 1, 2)).numpy()

  def close(path, **settings):
    model, params = load_pretrained(path, image_size=size, **settings)
    ours = model.apply({'params': params}, images)
    return np.abs(ours - logits).max() < 1e-4

  path = timm_file(tmp_path / 'a', theirs)
  assert close(path, **PLAIN)
  assert not close(path, **PLAIN, window_rule='authors')
  source = pretrained.find(path)
  _, params = load_pretrained(path, **PLAIN)
  other = str(tmp_path / 'again.safetensors')
  pretrained.save(other, params, source.about | dict(normalization=PLAIN))
  assert pretrained.find(other).about['model'] == TIMM
  assert close(other)
  other = saved_there(tmp_path / 'b', hugging_face_swin(64))
  assert 'window_rule' not in pretrained.find(other).about['model']


@pytest.mark.slow
def test_hugging_face_files_give_its_results(tmp_path):
  """76x92 pixels have maps of 19x23, 10x12 and 5x6.

  There the padding is in the middle of shifted windows. Hugging Face pads
  before the shift, as the authors' code for detection does.
  """
  theirs = hugging_face_swin(64)
  path = saved_there(tmp_path, theirs)
  about = pretrained.find(path).about
  assert about['model'] == dict(name='swin', dtype='float32', **SIZES)
  assert about['num_classes'] == 7 and about['image_size'] == [64, 64]
  model, params = load_pretrained(path)
  images = images_of(76, 92)
  blocks = [b for stage in theirs.swin.encoder.layers for b in stage.blocks]
  check_all(model, params, images, *after_blocks(blocks, theirs, images))


@pytest.mark.slow
def test_gradients_equal_timm(tmp_path):
  """They are compared for every parameter, with timm's names."""
  theirs, images = timm_swin_transformer(48), images_of(48, 48)
  model, params = load_pretrained(timm_file(tmp_path, theirs), **PLAIN)
  weights = np.random.default_rng(1).normal(size=(2, 7)).astype(np.float32)
  logits = theirs(torch.tensor(images).permute(0, 3, 1, 2))
  (logits * torch.tensor(weights)).sum().backward()

  def loss(params):
    return (model.apply({'params': params}, images) * weights).sum()

  grads = tree.flatten(jax.device_get(jax.jit(jax.grad(loss))(params)))
  ours = dict(swin.names(len(model.depths)).export(grads))
  for name, parameter in theirs.named_parameters():
    expected = parameter.grad.numpy()
    scale = max(np.abs(expected).max(), 1.0)
    np.testing.assert_allclose(
      ours[name], expected, rtol=0, atol=1e-4 * scale, err_msg=name
    )


@pytest.mark.slow
def test_conversion_from_timm_and_back_is_exact(tmp_path):
  """Everything that no array shows is kept as well."""
  theirs = timm_swin_transformer(64)
  config = dict(architecture='swin_tiny', pretrained_cfg=PLAIN)
  path = timm_file(tmp_path / 'a', theirs, config)
  _, params = load_pretrained(path)
  expected = tree.flatten(abstract_params(Model(7, **SIZES), (64, 64)))
  shapes = {k: v.shape for k, v in expected.items()}
  assert {k: v.shape for k, v in tree.flatten(params).items()} == shapes
  about = pretrained.find(path).about
  back = str(tmp_path / 'b.safetensors')
  pretrained.save(back, params, about)
  written, arrays = safetensors.numpy.load_file(back), arrays_of(theirs)
  assert written.keys() == arrays.keys()
  for name, array in arrays.items():
    np.testing.assert_array_equal(written[name], array)
  again = pretrained.find(back)
  assert again.about == about
  assert timm_swin_transformer(64).load_state_dict(
    {k: torch.from_numpy(v) for k, v in written.items()}, strict=True
  )


def test_small_windows_keep_their_size(tmp_path):
  """If images are smaller than a window, the notes contain its size."""
  sizes = dict(width=8, depths=(2, 2), num_heads=2, window_size=8)
  about = pretrained.find(timm_file(tmp_path, timm_swin_transformer(64))).about
  about |= {'model': dict(name='swin', **sizes), 'image_size': [16, 16]}
  model = Model(7, **sizes, dtype='float32')
  params = jax.tree.map(
    lambda leaf: jnp.ones(leaf.shape), abstract_params(model, (16, 16))
  )
  path = str(tmp_path / 'small.safetensors')
  pretrained.save(path, params, about)
  found = pretrained.find(path)
  assert found.about['model']['window_size'] == 8
  assert found.image_size == (16, 16)
  with pytest.raises(UserError, match='8 tokens'):
    pretrained.save(f'huggingface:{tmp_path}/x', params, about)


@pytest.mark.slow
def test_conversion_from_hugging_face_and_back_is_exact(tmp_path):
  """The library opens what was written, offline, and computes the same."""
  theirs = hugging_face_swin(64)
  path = saved_there(tmp_path / 'a', theirs)
  about = pretrained.find(path).about
  model, params = load_pretrained(path)
  out = tmp_path / 'b'
  pretrained.save(f'huggingface:{out}', params, about)
  auto = transformers.AutoModelForImageClassification
  opened = auto.from_pretrained(out, local_files_only=True).eval()
  assert type(opened) is type(theirs)
  images = torch.tensor(images_of(64, 64)).permute(0, 3, 1, 2)
  with torch.no_grad():
    np.testing.assert_array_equal(
      opened(images).logits.numpy(), theirs(images).logits.numpy()
    )
  first = safetensors.numpy.load_file(f'{path}/model.safetensors')
  last = safetensors.numpy.load_file(out / 'model.safetensors')
  assert last.keys() == {k for k in first if 'position_index' not in k}
  for name, array in last.items():
    np.testing.assert_array_equal(array, first[name])
  assert pretrained.find(str(out)).about == about
  # In memory, the library uses newer names.
  state = arrays_of(theirs)
  assert 'swin.encoder.layers.0.blocks.0.attention.q_proj.bias' in state
  safetensors.numpy.save_file(state, f'{path}/model.safetensors')
  _, again = load_pretrained(path)
  jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.slow
def test_files_of_the_authors_are_read(tmp_path):
  """Merging is at the end of stages, and buffers give the size."""
  model = timm_swin_transformer(64)
  source = pretrained.find(timm_file(tmp_path / 'a', model))
  assert source.image_size == (64, 64)
  renamed = {}
  for name, array in arrays_of(model).items():
    name = name.replace('head.fc', 'head')
    for stage in (1, 2):
      name = name.replace(
        f'layers.{stage}.downsample', f'layers.{stage - 1}.downsample'
      )
    renamed[name] = array
  mask, index = np.zeros((49, 16, 16)), np.zeros((16, 16))
  renamed['layers.0.blocks.1.attn_mask'] = mask
  renamed['mask_token'] = np.zeros((1, 1, 16))  # of SimMIM
  renamed['layers.0.blocks.0.attn.relative_position_index'] = index
  path = tmp_path / 'authors.pth'
  torch.save({'model': {k: torch.tensor(v) for k, v in renamed.items()}}, path)
  other = pretrained.find(str(path))
  assert other.image_size == (112, 112)
  assert source.about['model'] == TIMM
  assert other.about['model'] == AUTHORS
  assert other.about['normalization']['mean'] == list(IMAGENET[0])
  (_, first), (_, again) = (
    load_pretrained(each) for each in (source.path, str(path))
  )
  jax.tree.map(np.testing.assert_array_equal, first, again)


def test_unsupported_configs_are_refused(tmp_path):
  """The library's Swin has options that this one does not have."""
  path = saved_there(tmp_path, hugging_face_swin(64))
  file = tmp_path / 'config.json'
  good = json.loads(file.read_text())

  def load(**changes):
    file.write_text(json.dumps(good | changes))
    return load_pretrained(path)

  with pytest.raises(UserError, match="mlp_ratio': 2.0.*: 4"):
    load(mlp_ratio=2.0)
  with pytest.raises(UserError, match=r'\[2, 2, 2\].* \[2, 4, 8\]'):
    load(num_heads=[2, 2, 2])
  with pytest.raises(UserError, match='model.norm_eps'):
    load(layer_norm_eps=0.01)
  with pytest.raises(UserError, match='model.gelu'):
    load(hidden_act='relu')


@pytest.mark.parametrize('old, new', [(7, 12), (12, 7), (4, 3)])
def test_resized_bias_tables_equal_torch(old, new):
  """`interpolate(mode='bicubic')`, as in the authors' code."""
  table = np.random.default_rng(0).normal(size=(2, (2 * old - 1) ** 2, 3))
  table = table.astype(np.float32)
  maps = torch.tensor(table).reshape(2, 2 * old - 1, 2 * old - 1, 3)
  expected = torch.nn.functional.interpolate(
    maps.permute(0, 3, 1, 2), (2 * new - 1, 2 * new - 1), mode='bicubic'
  )
  expected = expected.permute(0, 2, 3, 1).reshape(2, -1, 3).numpy()
  ours = resize_bias(jnp.asarray(table), new)
  np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_another_window_is_named(tmp_path):
  """A file that does not fit an argument is not called damaged."""
  path = timm_file(tmp_path / 'there', timm_swin_transformer(64))
  with pytest.raises(UserError, match='window_size=4.*window_size=6') as error:
    load_pretrained(path, image_size=96, window_size=6, num_heads=2)
  assert path in str(error.value)
  assert 'damaged' not in str(error.value)
  assert 'num_heads' not in str(error.value)
  assert load_pretrained(path, window_size=4).model.window_size == 4
  # Fine-tuning resizes the tables, as the message says.
  source = pretrained.find(path)
  mesh = sharding.make_mesh(jax.devices()[:1])
  model = source.model(window_size=6)
  adapted = transfer.adapt(
    load_pretrained(path).params, model, source, (96, 96), None, mesh
  )
  expected = jax.tree.map(jnp.shape, abstract_params(model, (96, 96)))
  assert jax.tree.map(jnp.shape, adapted) == expected


def test_finetuning_keeps_the_window(tmp_path):
  """A config that sets another window gets it."""
  folder = tmp_path / 'there'
  source = pretrained.find(timm_file(folder, timm_swin_transformer(64)))
  open_keys = {key: None for key in ('width', 'depths', 'num_heads')}
  for given, expected in ((7, SIZES['window_size']), (8, 8)):
    model = dict(name='swin', window_size=given, **open_keys)
    config = minimal_config.completed(model=model)
    adopted = finetune.adopt_architecture(config, source)
    assert adopted.model.window_size == expected
