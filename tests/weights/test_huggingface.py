"""Tests of Hugging Face directories against the library."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import safetensors.numpy
from references import CLASSES, SIZE, huggingface, transformers

from tests.faults.counts import further
from vit_jax import load_pretrained
from vit_jax.arrays import tree
from vit_jax.arrays.pixels import IMAGENET
from vit_jax.data.augment.transforms import EvalTransform
from vit_jax.errors import UserError
from vit_jax.models.contract import abstract_params
from vit_jax.weights import pretrained

IMAGENET_STATISTICS = dict(mean=IMAGENET[0], std=IMAGENET[1])


def written(folder, model, **changes):
  """Writes the library's own directory, with changes to its config."""
  model.save_pretrained(folder)
  file = folder / 'config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))
  return str(folder)


@pytest.mark.parametrize('names', ['disk', 'memory', 'shards'])
def test_logits_and_blocks_equal_the_library(tmp_path, names):
  """With the names of all major versions, and in several files."""
  reference = huggingface()
  path = written(tmp_path, reference, id2label={i: f'x{i}' for i in range(7)})
  if (
    names == 'memory'
  ):  # since version 5, names in memory differ from those on disk
    file = tmp_path / 'model.safetensors'
    state = references.state(reference)
    assert 'vit.layers.0.attention.q_proj.weight' in state
    safetensors.numpy.save_file(state, file)
  elif names == 'shards':
    (tmp_path / 'model.safetensors').unlink()
    reference.save_pretrained(tmp_path, max_shard_size='20KB')
    assert len(list(tmp_path.glob('model-*.safetensors'))) > 2
    assert not (tmp_path / 'model.safetensors').exists()
  model, params = load_pretrained(path)
  references.agree(model, params, reference)
  if names == 'disk':
    about = pretrained.find(path).about
    assert about['class_names'] == [f'x{i}' for i in range(CLASSES)]
    assert about['preprocess']['resize'] == 'squash'


@pytest.mark.parametrize('gelu', ['gelu', 'gelu_pytorch_tanh'])
def test_written_directories_open_in_the_library(tmp_path, gelu):
  """`AutoModelForImageClassification` gives the same logits, offline."""
  reference = huggingface(hidden_act=gelu)
  path = written(tmp_path / 'a', reference)
  model, params = load_pretrained(path)
  names = list('abcdefg')
  about = pretrained.find(path).about | {'class_names': names}
  out = tmp_path / 'b'
  pretrained.save(f'huggingface:{out}', params, about)
  auto = transformers.AutoModelForImageClassification
  opened = auto.from_pretrained(out, local_files_only=True).eval()
  assert opened.config.layer_norm_eps == 1e-6
  assert [opened.config.id2label[i] for i in range(CLASSES)] == names
  references.agree(model, params, opened)
  written_there = safetensors.numpy.load_file(out / 'model.safetensors')
  original = safetensors.numpy.load_file(f'{path}/model.safetensors')
  assert written_there.keys() == original.keys()
  for key, array in original.items():
    np.testing.assert_array_equal(written_there[key], array)
  again = pretrained.find(str(out)).about
  assert again['model'] == about['model']
  assert again['class_names'] == names
  with pytest.raises(UserError, match='exists'):
    pretrained.save(f'huggingface:{out}', params, about)


def test_a_model_without_a_head_gives_its_pooler_output(tmp_path):
  """The pooler is read as the pre-logits layer."""
  reference = huggingface(head='Model')
  path = written(tmp_path / 'a', reference)
  model, params = load_pretrained(path)
  x = references.images()
  pixels = references.torch.from_numpy(x.transpose(0, 3, 1, 2).copy())
  with references.torch.no_grad():
    expected = reference(pixels).pooler_output.numpy()
  np.testing.assert_allclose(
    model.apply({'params': params}, x), expected, atol=1e-4
  )
  about = pretrained.find(path).about
  pretrained.save(f'huggingface:{tmp_path}/b', params, about)
  _, again = load_pretrained(f'{tmp_path}/b')
  for place, leaf in tree.flatten(params).items():
    np.testing.assert_array_equal(leaf, tree.flatten(again)[place])


@pytest.mark.slow
def test_conversion_through_all_formats_keeps_everything(tmp_path):
  """npz, timm, Hugging Face, checkpoint: same bits and description."""
  from vit_jax import convert

  _, params = load_pretrained(written(tmp_path / 'a', huggingface()))
  about = pretrained.find(str(tmp_path / 'a')).about
  start = str(tmp_path / 'b.npz')
  pretrained.save(start, params, about)
  way = [
    f'{tmp_path}/c.safetensors',
    f'huggingface:{tmp_path}/d',
    f'{tmp_path}/e',
    f'big_vision:{tmp_path}/f.npz',
    f'{tmp_path}/g.npz',
  ]
  for source, target in zip([start, *way], way, strict=False):
    convert.run(source.removeprefix('huggingface:'), target)
  with np.load(start) as first, np.load(way[-1]) as last:
    assert set(first.files) == set(last.files)
    for name in first.files:
      if name != 'cls' and 'pos_embedding' not in name:
        np.testing.assert_array_equal(first[name], last[name])
    position = 'Transformer/posembed_input/pos_embedding'
    np.testing.assert_array_equal(first[position][:, 1:], last[position][:, 1:])
    np.testing.assert_array_equal(
      first['cls'] + first[position][:, :1], last['cls']
    )
  for before in (f'{tmp_path}/c.safetensors', f'{tmp_path}/d', f'{tmp_path}/e'):
    _, again = load_pretrained(before)
    for place, leaf in tree.flatten(params).items():
      np.testing.assert_array_equal(leaf, tree.flatten(again)[place])
    assert pretrained.find(before).about['model']['gelu'] == 'exact'


PROCESSORS = [
  (dict(size=dict(height=16, width=16), resample=2), 'squash'),
  (
    dict(
      size=dict(height=20, width=20),
      crop_size=dict(height=16, width=16),
      do_center_crop=True,
      resample=3,
    ),
    'squash_central',
  ),
  (
    dict(
      size=dict(shortest_edge=20),
      crop_size=dict(height=16, width=16),
      do_center_crop=True,
      resample=3,
    ),
    'torchvision',
  ),
]


@pytest.mark.parametrize('given, resize', PROCESSORS)
def test_preprocessing_is_read_and_written(tmp_path, given, resize):
  statistics = dict(image_mean=IMAGENET[0], image_std=IMAGENET[1])
  path = written(tmp_path / 'a', huggingface())
  file = tmp_path / 'a' / 'preprocessor_config.json'
  file.write_text(json.dumps(given | statistics))
  source = pretrained.find(path)
  assert source.about['preprocess']['resize'] == resize
  transform = source.preprocess()
  assert isinstance(transform, EvalTransform)
  model, params = load_pretrained(path)
  references.agree(model, params, huggingface(), **IMAGENET_STATISTICS)
  pretrained.save(f'huggingface:{tmp_path}/b', params, source.about)
  again = json.loads((tmp_path / 'b' / 'preprocessor_config.json').read_text())
  for key, value in (given | statistics).items():
    assert again[key] == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize('name', ['area', 'bilinear', 'bicubic'])
def test_unsupported_interpolation_is_kept_and_logged(tmp_path, caplog, name):
  """It is restored here; a warning says that the library resizes otherwise."""
  path = written(tmp_path / 'a', huggingface())
  _, params = load_pretrained(path)
  section = {'resize': 'central', 'central_fraction': 0.875}
  about = pretrained.find(path).about
  about['preprocess'] = section | {'interpolation': name}
  if name == 'bicubic':
    about['preprocess']['resize'] = 'torchvision'
  pretrained.save(f'huggingface:{tmp_path}/b', params, about)
  again = pretrained.find(f'{tmp_path}/b').about['preprocess']
  assert again['interpolation'] == name
  assert (repr(name) in caplog.text) == (name != 'bicubic')
  if name != 'bicubic':
    assert again == about['preprocess']


def test_the_central_fraction_is_at_most_one(tmp_path):
  """The crop may be larger than the image."""
  path = written(tmp_path, huggingface())
  settings = dict(do_center_crop=True, size={'shortest_edge': 12}, crop_size=16)
  (tmp_path / 'preprocessor_config.json').write_text(json.dumps(settings))
  source = pretrained.find(path)
  assert source.about['preprocess']['central_fraction'] == 1
  source.preprocess()


@pytest.mark.parametrize(
  'kind, head, changes',
  [
    ('DeiT', 'ForImageClassificationWithTeacher', {}),
    ('ViT', 'ForImageClassification', dict(layer_norm_eps=1e-3)),
  ],
)
def test_models_with_distillation_and_epsilon_equal_the_library(
  tmp_path, kind, head, changes
):
  reference = huggingface(kind, head, **changes)
  statistics = {} if kind == 'ViT' else IMAGENET_STATISTICS
  model, params = load_pretrained(written(tmp_path, reference))
  references.agree(model, params, reference, **statistics)


@pytest.mark.parametrize(
  'given',
  [
    dict(do_rescale=False),
    dict(do_rescale=False, do_normalize=False),
    dict(rescale_factor=1 / 127.5),
    dict(do_normalize=False),
    dict(image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]),
  ],
)
def test_pixels_are_rescaled_as_in_the_library(tmp_path, given):
  """From bytes to logits, with the library's image processor."""
  processor = transformers.ViTImageProcessor(
    do_resize=False, **dict(image_mean=[0.5] * 3, image_std=[0.5] * 3) | given
  )
  reference = huggingface()
  with references.torch.no_grad():  # so that logits of 255 are moderate
    reference.vit.embeddings.patch_embeddings.projection.weight *= 0.01
  path = written(tmp_path, reference)
  processor.save_pretrained(path)
  images = np.random.default_rng(0).integers(0, 256, (2, SIZE, SIZE, 3))
  images = images.astype(np.uint8)
  inputs = processor([*images], return_tensors='pt')
  with references.torch.no_grad():
    expected = reference(**inputs).logits.numpy()
  model, params = load_pretrained(path)
  ours = model.apply({'params': params}, images / np.float32(127.5) - 1)
  np.testing.assert_allclose(ours, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['Dinov2WithRegisters', *further('Dinov2')])
@pytest.mark.parametrize('gated', [True, *further(False)])
def test_dinov2_equals_the_library(tmp_path, kind, gated):
  """The head's input is the class token and the mean of the patches."""
  reference = huggingface(
    kind, intermediate_size=None, mlp_ratio=2, use_swiglu_ffn=gated
  )
  path = written(tmp_path / 'a', reference)
  model, params = load_pretrained(path)
  references.agree(model, params, reference, **IMAGENET_STATISTICS)
  pretrained.save(
    f'huggingface:{tmp_path}/b', params, pretrained.find(path).about
  )
  original = safetensors.numpy.load_file(f'{path}/model.safetensors')
  copy = safetensors.numpy.load_file(tmp_path / 'b' / 'model.safetensors')
  assert copy.keys() == original.keys()
  for name, array in original.items():
    # The position of the class token is added to the token.
    if not re.search('mask_token|cls_token|position', name):
      np.testing.assert_allclose(copy[name], array, atol=1e-5)


def sharded(folder):
  """Writes a model in several files and an index; returns the index."""
  huggingface().save_pretrained(folder, max_shard_size='20KB')
  return folder / 'model.safetensors.index.json'


def test_shards_must_be_those_of_the_index(tmp_path):
  """A tensor in another file, a missing and an extra one, another folder."""
  index = sharded(tmp_path)
  good = index.read_text()
  files = json.loads(good)['weight_map']
  name, first = next(iter(files.items()))
  other = next(file for file in files.values() if file != first)
  for change, words in (
    (lambda weight_map: weight_map.update({name: other}), name),
    (lambda weight_map: weight_map.update({'lost': first}), 'lost'),
    (lambda weight_map: weight_map.pop(name), name),
    (
      lambda weight_map: weight_map.update({name: f'../{first}'}),
      'weight_map',
    ),
  ):
    content = json.loads(good)
    change(content['weight_map'])
    index.write_text(json.dumps(content))
    for path in (tmp_path, tmp_path / first):
      with pytest.raises(UserError, match=re.escape(words)) as error:
        load_pretrained(str(path))
      assert str(index) in str(error.value)
  index.write_text(good)
  assert load_pretrained(str(tmp_path / first)).model.depth == references.DEPTH


@pytest.mark.parametrize('shards', [False, True])
def test_directories_with_pickles_are_read(tmp_path, shards):
  """Older models have pytorch_model.bin and no .safetensors."""
  reference = huggingface()
  path = written(tmp_path, reference)
  (tmp_path / 'model.safetensors').unlink()
  with pytest.raises(UserError, match='model.safetensors does not exist'):
    load_pretrained(path)
  state = reference.state_dict()
  if shards:
    names = {name: f'pytorch_model-{len(name) % 2}.bin' for name in state}
    for file in set(names.values()):
      part = {name: state[name] for name in names if names[name] == file}
      references.torch.save(part, tmp_path / file)
    index = tmp_path / 'pytorch_model.bin.index.json'
    index.write_text(json.dumps({'weight_map': names}))
    files = [path, f'{path}/pytorch_model-1.bin']
  else:
    references.torch.save(state, tmp_path / 'pytorch_model.bin')
    files = [path, f'{path}/pytorch_model.bin']
  for each in files:
    model, params = load_pretrained(each)
    references.agree(model, params, reference)


OPTIONS = {
  'distilled': ('deit', dict(distilled=True)),
  'a distillation token that is not used': (
    'deit',
    dict(registers=1, prefix_positions=True),
  ),
  'registers': ('dinov2_with_registers', dict(registers=2)),
  'registers with positions': (
    'dinov2_with_registers',
    dict(registers=2, prefix_positions=True, layer_scale=1e-4),
  ),
  'LayerScale': ('dinov2', dict(layer_scale=1e-4)),
  'gated': ('dinov2', dict(gated=True, layer_scale=1e-4, mlp_dim=88)),
  'patches alone': ('vit', dict(prefix_positions=False)),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', [*OPTIONS][:1] + further(*[*OPTIONS][1:]))
def test_options_are_written(tmp_path, name):
  """The library's class with these options computes the same."""
  kind, keys = OPTIONS[name]
  about = pretrained.find(written(tmp_path / 'a', huggingface())).about
  about['model'] |= keys
  model = pretrained.Pretrained('', about, lambda abstract: None).model()
  shapes = tree.flatten(abstract_params(model, (SIZE, SIZE)))
  rng = np.random.default_rng(0)
  params = tree.unflatten(
    {
      k: rng.normal(k.endswith('scale'), 0.2, v.shape).astype(np.float32)
      for k, v in shapes.items()
    }
  )
  out = tmp_path / 'b'
  pretrained.save(f'huggingface:{out}', params, about)
  assert json.loads((out / 'config.json').read_text())['model_type'] == kind
  auto = transformers.AutoModelForImageClassification
  opened, loading = auto.from_pretrained(
    out, local_files_only=True, output_loading_info=True
  )
  for trouble in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):
    assert not loading[trouble]
  params = jax.tree.map(jnp.asarray, params)
  references.agree(model, params, opened.eval())
  again, same = load_pretrained(str(out))
  x = references.images()
  np.testing.assert_allclose(
    again.apply({'params': same}, x),
    model.apply({'params': params}, x),
    atol=1e-6,
  )


@pytest.mark.parametrize(
  'keys, words',
  [
    (dict(qk_norm=True), 'qk_norm, as ViT has none'),
    (dict(gated=True, mlp_dim=40), 'MLP of 40 units for a width of 32'),
    (dict(layer_scale=1.0, mlp_dim=40), 'MLP of 40 units for a width of 32'),
    (dict(distilled=True, registers=1), 'registers, as DeiT has none'),
    (dict(position='none'), "learned.*'none'"),
    (dict(pool='gap'), "pool 'gap'"),
  ],
)
def test_options_without_a_class_in_the_library_are_refused(
  tmp_path, keys, words
):
  """Each is named in the message."""
  about = pretrained.find(written(tmp_path / 'a', huggingface())).about
  about['model'] |= keys
  model = pretrained.Pretrained('', about, lambda abstract: None).model()
  params = abstract_params(model, (SIZE, SIZE))
  with pytest.raises(UserError, match=words):
    pretrained.save(f'huggingface:{tmp_path}/b', params, about)
  assert not (tmp_path / 'b').exists()
