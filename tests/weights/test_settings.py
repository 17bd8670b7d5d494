"""Tests of settings next to weights: changes are accepted or one message."""

import json
import random

import pytest
from references import HEADS, huggingface, timm_file, timm_vit, transformers

from vit_jax.errors import UserError
from vit_jax.weights import metadata, pretrained

VALUES = [
  'x',
  5,
  -1,
  0,
  10**9,
  1.5,
  1e300,
  float('nan'),
  True,
  None,
  [],
  ['x'],
  [-1, 0],
  {},
  {'x': []},
]


def mutations(content):
  """Yields (key, content) with one value replaced, at any depth."""
  for key, value in content.items():
    for other in VALUES:
      yield key, content | {key: other}
    if isinstance(value, dict):
      for inner, changed in mutations(value):
        yield f'{key}.{inner}', content | {key: changed}


def check_all(file, path, limit):
  """Opens weights with each of some mutations of a JSON file next to them."""
  original = file.read_text()
  found = list(mutations(json.loads(original)))
  refused = 0
  for key, content in random.Random(0).sample(found, min(limit, len(found))):
    file.write_text(json.dumps(content))
    try:
      source = pretrained.find(path)
      source.preprocess()
    except UserError as error:
      refused += 1
      assert len(str(error)) < 5000, key
  file.write_text(original)
  assert refused > 10


@pytest.mark.slow
@pytest.mark.parametrize(
  'kind',
  [
    'ViT',
    *(pytest.param(k, marks=pytest.mark.long) for k in ('Dinov2', 'DeiT')),
  ],
)
@pytest.mark.parametrize('name', ['config', 'preprocessor_config'])
def test_mutated_hugging_face_settings(tmp_path, kind, name):
  """config.json and preprocessor_config.json, key by key."""
  huggingface(kind).save_pretrained(tmp_path)
  content = dict(
    do_normalize=True,
    do_center_crop=True,
    size={'height': 20, 'width': 20},
    crop_size={'height': 16, 'width': 16},
    resample=3,
    image_mean=[0.5] * 3,
    image_std=[0.5] * 3,
  )
  (tmp_path / 'preprocessor_config.json').write_text(json.dumps(content))
  check_all(tmp_path / f'{name}.json', str(tmp_path), 250)


@pytest.mark.slow
@pytest.mark.long
def test_mutated_hugging_face_swin_settings(tmp_path):
  """The sizes of stages are lists."""

  config = transformers.SwinConfig(
    embed_dim=8,
    depths=[2, 2],
    num_heads=[2, 4],
    window_size=2,
    image_size=16,
    num_labels=3,
  )
  transformers.SwinForImageClassification(config).save_pretrained(tmp_path)
  check_all(tmp_path / 'config.json', str(tmp_path), 150)


@pytest.mark.slow
def test_mutated_timm_settings(tmp_path):
  """timm's config.json."""
  config = dict(
    architecture='vit_base_patch16_224',
    global_pool='token',
    model_args=dict(num_heads=HEADS, act_layer='gelu'),
    label_names=list('abcdefg'),
    pretrained_cfg=dict(
      input_size=[3, 16, 16],
      mean=[0.5] * 3,
      std=[0.5] * 3,
      crop_pct=0.9,
      interpolation='bicubic',
      crop_mode='center',
    ),
  )
  path = timm_file(tmp_path, timm_vit(), config)
  check_all(tmp_path / 'config.json', path, 250)


# {file: [(key, wrong value)]}
WRONG = {
  'config': [
    ('num_hidden_layers', 10**9),
    ('hidden_size', 'x'),
    ('hidden_size', 33),
    ('num_attention_heads', 5.5),
    ('id2label', 5),
    ('id2label', {'9' * 6000: 'x'}),
    ('image_size', []),
    ('image_size', 2),
    ('layer_norm_eps', float('nan')),
    ('layer_norm_eps', 10**400),
    ('hidden_act', ['gelu']),
  ],
  'preprocessor_config': [
    ('do_rescale', 'false'),
    ('rescale_factor', '0.5'),
    ('rescale_factor', 0),
    ('do_normalize', 'false'),
    ('do_normalize', 0),
    ('image_mean', ['0.5', '0.5', '0.5']),
    ('image_std', '0.5'),
    ('size', {'longest_edge': 3}),
  ],
}


@pytest.mark.parametrize(
  'name, key, value',
  [(name, *pair) for name, pairs in WRONG.items() for pair in pairs],
)
def test_a_wrong_setting_is_one_message(tmp_path, name, key, value):
  """The message contains the key and the start of the value."""
  huggingface().save_pretrained(tmp_path)
  file = tmp_path / f'{name}.json'
  content = json.loads(file.read_text()) if file.exists() else {}
  file.write_text(json.dumps(content | {key: value}))
  with pytest.raises(UserError) as error:
    pretrained.find(str(tmp_path))
  assert f'{key} is {repr(value)[:40]}' in str(error.value)


def test_validated_treats_null_as_absent():
  """Nested keys are named in full."""
  rules = {'a': metadata.integer(1, 2), 'b': {'c': metadata.TEXT}}
  assert metadata.validated('f', {'a': None, 'd': 1}, rules) == {'d': 1}
  with pytest.raises(UserError, match='b.c is 3'):
    metadata.validated('f', {'b': {'c': 3}}, rules)
  with pytest.raises(UserError, match='b is 3.*an object'):
    metadata.validated('f', {'b': 3}, rules)
  with pytest.raises(UserError, match='a is True'):
    metadata.validated('f', {'a': True}, rules)
