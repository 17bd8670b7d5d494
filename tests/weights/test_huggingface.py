"""Tests of Hugging Face directories: files, preprocessing and options."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
import references
import safetensors.numpy
import tiny_vit
from references import SIZE, huggingface, transformers

from tests.faults.counts import further
from vit_jax import load_pretrained
from vit_jax.arrays.pixels import IMAGENET
from vit_jax.errors import UserError
from vit_jax.models.contract import abstract_params
from vit_jax.weights import pretrained


def written(folder, model, **changes):
  """Writes the library's own directory, with changes to its config."""
  model.save_pretrained(folder)
  file = folder / 'config.json'
  file.write_text(json.dumps(json.loads(file.read_text()) | changes))
  return str(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind', ['shards', *further('names in memory', 'pickle', 'pickled shards')]
)
def test_weights_in_other_files_are_read(tmp_path, kind):
  """The names since version 5, several files, and older directories."""
  reference = huggingface()
  path = written(tmp_path, reference, id2label={i: f'x{i}' for i in range(7)})
  expected = load_pretrained(path)
  assert expected.class_names == [f'x{i}' for i in range(7)]
  (tmp_path / 'model.safetensors').unlink()
  with pytest.raises(UserError, match='model.safetensors does not exist'):
    load_pretrained(path)
  state = reference.state_dict()
  assert 'vit.layers.0.attention.q_proj.weight' in state
  if kind == 'names in memory':
    arrays = references.state(reference)
    safetensors.numpy.save_file(arrays, tmp_path / 'model.safetensors')
  elif kind == 'shards':
    reference.save_pretrained(tmp_path, max_shard_size='20KB')
    assert len([*tmp_path.glob('model-*.safetensors')]) > 2
  elif kind == 'pickle':
    references.torch.save(state, tmp_path / 'pytorch_model.bin')
  else:
    files = {name: f'pytorch_model-{len(name) % 2}.bin' for name in state}
    index = tmp_path / 'pytorch_model.bin.index.json'
    index.write_text(json.dumps({'weight_map': files}))
    for file in set(files.values()):
      part = {name: state[name] for name in state if files[name] == file}
      references.torch.save(part, tmp_path / file)
  for each in (tmp_path, *[*tmp_path.glob('*model-*')][:1]):
    params = load_pretrained(str(each)).params
    jax.tree.map(np.testing.assert_array_equal, params, expected.params)


def test_shards_must_be_those_of_the_index(tmp_path):
  """A tensor in another file, a missing and an extra one, another folder."""
  huggingface().save_pretrained(tmp_path, max_shard_size='20KB')
  index = tmp_path / 'model.safetensors.index.json'
  files = json.loads(index.read_text())['weight_map']
  name, first = next(iter(files.items()))
  other = next(file for file in files.values() if file != first)
  for changed, words in (
    (files | {name: other}, name),
    (files | {'lost': first}, 'lost'),
    ({k: v for k, v in files.items() if k != name}, name),
    (files | {name: f'../{first}'}, 'weight_map'),
  ):
    index.write_text(json.dumps({'weight_map': changed}))
    for path in (tmp_path, tmp_path / first):
      with pytest.raises(UserError, match=re.escape(words)) as error:
        load_pretrained(str(path))
      assert str(index) in str(error.value)


NAME = 'preprocessor_config.json'
CROPPED = dict(
  crop_size=dict(height=16, width=16), do_center_crop=True, resample=3
)


@pytest.mark.parametrize(
  'given, resize',
  [
    (dict(size=dict(height=16, width=16), resample=2), 'squash'),
    (CROPPED | dict(size=dict(height=20, width=20)), 'squash_central'),
    (CROPPED | dict(size=dict(shortest_edge=20)), 'torchvision'),
  ],
)
def test_preprocessing_is_read_and_written(tmp_path, given, resize):
  given = given | dict(image_mean=[*IMAGENET[0]], image_std=[*IMAGENET[1]])
  path = written(tmp_path / 'a', huggingface())
  (tmp_path / 'a' / NAME).write_text(json.dumps(given))
  description = pretrained.find(path).description
  assert description.transform() and description.preprocess['resize'] == resize
  params = load_pretrained(path).params
  pretrained.save(f'huggingface:{tmp_path}/b', params, description)
  again = json.loads((tmp_path / 'b' / NAME).read_text())
  assert {key: again[key] for key in given} == given


def test_the_central_fraction_is_at_most_one(tmp_path):
  """The crop may be larger than the image."""
  path = written(tmp_path, huggingface())
  settings = dict(do_center_crop=True, size={'shortest_edge': 12}, crop_size=16)
  (tmp_path / NAME).write_text(json.dumps(settings))
  description = pretrained.find(path).description
  assert description.preprocess['central_fraction'] == 1
  description.transform()


@pytest.mark.parametrize('name', ['area', 'bilinear', 'bicubic'])
def test_unsupported_interpolation_is_kept_and_logged(tmp_path, caplog, name):
  """It is restored here; a warning says that the library resizes otherwise."""
  path = written(tmp_path / 'a', huggingface())
  resize = 'torchvision' if name == 'bicubic' else 'central'
  section = dict(resize=resize, central_fraction=0.875, interpolation=name)
  description = dataclasses.replace(
    pretrained.find(path).description, preprocess=section
  )
  params = load_pretrained(path).params
  pretrained.save(f'huggingface:{tmp_path}/b', params, description)
  again = pretrained.find(f'{tmp_path}/b').description.preprocess
  assert again['interpolation'] == name
  assert (repr(name) in caplog.text) == (name != 'bicubic')
  assert again == section or name == 'bicubic'


@pytest.mark.slow
@pytest.mark.parametrize(
  'given',
  [
    dict(rescale_factor=1 / 127.5),
    *further(
      dict(do_rescale=False),
      dict(do_rescale=False, do_normalize=False),
      dict(do_normalize=False),
      dict(image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.4]),
    ),
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
  inputs = processor([*np.uint8(images)], return_tensors='pt')
  with references.torch.no_grad():
    expected = reference(**inputs).logits.numpy()
  model, params = load_pretrained(path)
  ours = model.apply({'params': params}, images / np.float32(127.5) - 1)
  np.testing.assert_allclose(ours, expected, atol=1e-4)


def with_options(tmp_path, **keys):
  """Returns a model with some options, and its description."""
  source = pretrained.find(written(tmp_path / 'a', huggingface()))
  description = source.description.with_model(**keys)
  if keys.get('position') == 'rope2d':  # DINOv3 has no head
    headless = dict(num_classes=0, class_names=())
    description = dataclasses.replace(description, **headless)
  return description.built_model, description


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind, keys',
  [
    # A distillation token that is not used
    ('deit', dict(registers=1, prefix_positions=True)),
    *further(
      ['dinov2_with_registers', dict(registers=2)],
      ['dinov2_with_registers', dict(registers=2, prefix_positions=True)],
      ['vit', dict(prefix_positions=False)],
      ['dinov3_vit', dict(position='rope2d')],
    ),
  ],
)
def test_options_are_written(tmp_path, kind, keys):
  """The library's class with these options computes the same."""
  model, description = with_options(tmp_path, **keys)
  params = tiny_vit.noise_params(model, (SIZE, SIZE))
  out = tmp_path / 'b'
  pretrained.save(f'huggingface:{out}', params, description)
  assert json.loads((out / 'config.json').read_text())['model_type'] == kind
  ending = 'ForImageClassification' if description.num_classes else ''
  auto = getattr(transformers, f'AutoModel{ending}')
  opened, loading = auto.from_pretrained(
    out, local_files_only=True, output_loading_info=True
  )
  for trouble in ('missing_keys', 'unexpected_keys', 'mismatched_keys'):
    assert not loading[trouble]
  opened = opened.eval()
  theirs = opened if ending else lambda x: opened(x).pooler_output
  for weights in ((model, params), str(out)):
    references.same_results(weights, theirs, (SIZE, SIZE))


@pytest.mark.parametrize(
  'keys, words',
  [
    (dict(qk_norm=True), r'qk_norm=True \(it would open with False\)'),
    (dict(gated=True, mlp_dim=40), 'MLP of 40 units for a width of 32'),
    (dict(distilled=True, registers=1), 'registers=1'),
    (dict(position='rope2d', pool='gap'), "pool='gap'.*'token'"),
  ],
)
def test_options_without_a_class_in_the_library_are_refused(
  tmp_path, keys, words
):
  """Each is named in the message."""
  model, description = with_options(tmp_path, **keys)
  params = abstract_params(model, (SIZE, SIZE))
  with pytest.raises(UserError, match=words):
    pretrained.save(f'huggingface:{tmp_path}/b', params, description)
  assert not (tmp_path / 'b').exists()
