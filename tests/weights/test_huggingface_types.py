"""Tests of each type of Hugging Face's models against the library."""

import functools
import json
import pathlib
import re

import numpy as np
import pytest
import references
import safetensors.numpy
from references import PATCH, SIZE, SIZES, huggingface, torch

from tests.faults.counts import further, slow
from vit_jax import load_pretrained
from vit_jax.arrays.pixels import IMAGENET, NONE
from vit_jax.errors import UserError
from vit_jax.weights import pretrained
from vit_jax.weights.formats.huggingface import TYPES as SUPPORTED
from vit_jax.weights.formats.huggingface import VERSION
from vit_jax.weights.patch_embedding import CLIP

TEXT = dict(
  hidden_size=32,
  num_hidden_layers=1,
  num_attention_heads=4,
  intermediate_size=64,
  vocab_size=99,
  bos_token_id=1,
  eos_token_id=2,
)
TOWERS = dict(vision_config=SIZES, text_config=TEXT)
SWIN = dict(
  image_size=SIZE,
  patch_size=PATCH,
  embed_dim=16,
  depths=[2, 2],
  num_heads=[2, 4],
  window_size=2,
  hidden_act='gelu_pytorch_tanh',
)
OTHER = (12, 20)  # (height, width), smaller and not square


RELATIVE = dict(use_relative_position_bias=True)
MAE = dict(
  mask_ratio=0.0,
  decoder_hidden_size=16,
  decoder_num_hidden_layers=1,
  decoder_num_attention_heads=2,
  decoder_intermediate_size=32,
)
VIT = dict(
  hidden_act='gelu_pytorch_tanh',
  layer_norm_eps=1e-3,
  id2label=dict(enumerate('abcdefg')),
)
DATA2VEC = dict(use_absolute_position_embeddings=True, use_mean_pooling=False)
DINOV3 = dict(
  num_register_tokens=2, use_gated_mlp=True, hidden_act='silu', rope_theta=50.0
)
# {class: (config, mean and std)}
TYPES = {
  'ViTModel': ({}, NONE),
  'ViTForImageClassification': (VIT, NONE),
  'ViTMAEForPreTraining': (MAE, NONE),
  'ViTMSNForImageClassification': ({}, NONE),
  'IJepaForImageClassification': ({}, NONE),
  'DeiTForImageClassification': ({}, IMAGENET),
  'DeiTForImageClassificationWithTeacher': ({}, IMAGENET),
  'BeitModel': (dict(use_shared_relative_position_bias=True), NONE),
  'BeitForImageClassification': (
    RELATIVE | dict(layer_scale_init_value=0.0),
    NONE,
  ),
  'BeitForMaskedImageModeling': (
    RELATIVE | dict(use_mask_token=True, vocab_size=9),
    NONE,
  ),
  'Data2VecVisionModel': (DATA2VEC, NONE),
  'Data2VecVisionForImageClassification': (RELATIVE, NONE),
  'Dinov2ForImageClassification': ({}, IMAGENET),
  'Dinov2WithRegistersForImageClassification': (
    dict(use_swiglu_ffn=True),
    IMAGENET,
  ),
  'DINOv3ViTModel': (DINOV3, IMAGENET),
  'CLIPVisionModel': ({}, CLIP),
  'CLIPVisionModelWithProjection': (dict(projection_dim=24), CLIP),
  'CLIPModel': (dict(projection_dim=24, **TOWERS), CLIP),
  'SiglipVisionModel': ({}, NONE),
  'SiglipForImageClassification': (TOWERS, NONE),
  'SwinForImageClassification': (SWIN, IMAGENET),
  'Siglip2VisionModel': (dict(num_patches=(SIZE // PATCH) ** 2), NONE),
}
# Classes whose results are those of the class token, although they have others
OF_CLASS_TOKEN = ('ViTMAEForPreTraining', 'Data2VecVisionModel')


def library_result(model, pixels):
  """Returns the result that equals ours, for pixels `[n, c, y, x]`."""
  name = type(model).__name__
  keys = {'pixel_values': pixels, 'interpolate_pos_encoding': True}
  if name.startswith('ViTMAE'):  # all patches, in order
    count = pixels.shape[2] * pixels.shape[3] // PATCH**2
    keys['noise'] = torch.arange(count).expand(len(pixels), -1)
    model = model.vit
  if name == 'CLIPModel':  # whose projection belongs to the objective
    model = model.vision_model
  if name == 'Siglip2VisionModel':  # NaFlex: patches as vectors
    n, _, height, width = pixels.shape
    grid = (height // PATCH, width // PATCH)
    x = pixels.reshape(n, 3, grid[0], PATCH, grid[1], PATCH)
    x = x.permute(0, 2, 4, 3, 5, 1).reshape(n, grid[0] * grid[1], -1)
    mask = torch.ones(x.shape[:2], dtype=torch.int32)
    keys = dict(pixel_values=x, pixel_attention_mask=mask)
    keys['spatial_shapes'] = torch.tensor([grid] * n)
  if name == 'BeitForMaskedImageModeling':  # whose output lacks the class token
    hidden = model.beit(**keys).last_hidden_state
    return model.layernorm(hidden)[:, 0]
  outputs = model(**keys)
  if name in OF_CLASS_TOKEN:
    return outputs.last_hidden_state[:, 0]
  for key in ('logits', 'image_embeds', 'pooler_output'):
    if key in outputs:
      return outputs[key]
  raise AssertionError(name)


# Other classes of the same types, whose names differ by a prefix
FURTHER = ('CLIPVisionModel', 'CLIPVisionModelWithProjection')
FURTHER += ('SiglipVisionModel',)
# Classes of which each fast run tests the results
FAST = ('ViTForImageClassification', 'DINOv3ViTModel', 'CLIPModel')
FAST += ('DeiTForImageClassificationWithTeacher',)
SLOW = [name for name in TYPES if name not in FAST + FURTHER]


@pytest.mark.parametrize('name', [*FAST, *slow(*SLOW), *further(*FURTHER)])
def test_results_equal_the_library(tmp_path, name):
  """At its own size to 1e-5, and at another one to 1e-4."""
  changes, statistics = TYPES[name]
  reference = huggingface(name, **changes)
  reference.save_pretrained(tmp_path)
  results = functools.partial(library_result, reference)
  for size, limit in (((SIZE, SIZE), 1e-5), (OTHER, 1e-4)):
    references.same_results(str(tmp_path), results, size, statistics, limit)


@pytest.mark.parametrize(
  'name',
  [
    'ViTForImageClassification',
    *slow(
      'ViTModel',
      'DeiTForImageClassificationWithTeacher',
      'Dinov2ForImageClassification',
      'Dinov2WithRegistersForImageClassification',
      'DINOv3ViTModel',
    ),
  ],
)
def test_written_directories_open_in_the_library(tmp_path, name):
  """They have the same arrays, results and classes."""
  reference = huggingface(name, **TYPES[name][0])
  first, second = str(tmp_path / 'first'), str(tmp_path / 'second')
  reference.save_pretrained(first)
  params = load_pretrained(first).params
  description = pretrained.find(first).description
  pretrained.save(f'huggingface:{second}', params, description)
  for key in ('model', 'image_size', 'class_names'):
    found = getattr(pretrained.find(second).description, key)
    assert found == getattr(description, key)
  with pytest.raises(UserError, match='exists'):
    pretrained.save(f'huggingface:{second}', params, description)
  again = type(reference).from_pretrained(second, local_files_only=True)
  if description.num_classes:
    assert again.config.id2label == dict(enumerate(description.class_names))
  for key in ('layer_norm_eps', 'hidden_act'):
    assert getattr(again.config, key) == getattr(reference.config, key)
  pixels = torch.from_numpy(references.images().transpose(0, 3, 1, 2).copy())
  with torch.no_grad():
    expected, found = (
      library_result(model, pixels).numpy()
      for model in (reference, again.eval())
    )
  np.testing.assert_allclose(found, expected, atol=1e-5)
  original, copy = (
    safetensors.numpy.load_file(f'{path}/model.safetensors')
    for path in (first, second)
  )
  # Derived arrays; DINOv2's position of the class token is added to the token.
  other = 'position_index'
  if 'DINO' in name.upper():
    other += '|mask_token|cls_token|position'
  assert {n for n in original if 'position_index' not in n} == copy.keys()
  for key in copy:
    if not re.search(other, key):
      np.testing.assert_allclose(copy[key], original[key], atol=1e-5)


# {type: first of its classes}
CLASSES = {
  references.config_class(name).model_type: name for name in reversed(TYPES)
}


@pytest.mark.parametrize('kind', SUPPORTED)
def test_missing_keys_have_the_defaults_of_the_library(tmp_path, kind):
  """The table contains those of every key; the file itself is required."""
  defaults, name = SUPPORTED[kind].defaults, CLASSES[kind]
  library = references.config_class(name)().to_dict()
  assert {key: library[key] for key in defaults} == defaults
  huggingface(name, **TYPES[name][0]).save_pretrained(tmp_path)
  expected = pretrained.find(str(tmp_path)).description.to_json()
  file, weights = tmp_path / 'config.json', tmp_path / 'model.safetensors'
  config = json.loads(file.read_text())
  given = {k: v for k, v in config.items() if library.get(k, ...) != v}
  given['model_type'] = kind
  assert 'layer_norm_eps' not in given
  file.write_text(json.dumps(given))
  found = pretrained.find(str(tmp_path)).description.to_json()
  assert found == expected
  file.unlink()  # without it, the weights are not taken for those of timm
  for path, words in ((tmp_path, 'but no'), (weights, 'transformers.*fetch')):
    with pytest.raises(UserError, match=words) as error:
      pretrained.find(str(path))
    assert 'config.json' in str(error.value)


def test_the_defaults_are_those_of_the_tested_version():
  pinned = pathlib.Path('constraints.txt').read_text().replace('==', ' ')
  assert re.search(f'^{re.escape(VERSION)}[.]', pinned, re.MULTILINE)


def test_every_type_is_compared():
  compared = {references.config_class(name).model_type for name in TYPES}
  assert not SUPPORTED.keys() - compared


def test_a_head_of_clip_that_does_not_fit_is_left_out(tmp_path, caplog):
  """Its input is the mean of patches before the last LayerNorm."""
  huggingface('CLIPForImageClassification', **TOWERS).save_pretrained(tmp_path)
  assert load_pretrained(str(tmp_path)).model.num_classes == 0
  assert 'left out its classifier' in caplog.text
