"""Tests of settings next to weights: changes are accepted or one message."""

import json
import random

import jax.numpy as jnp
import numpy as np
import pytest
from references import (
  HEADS,
  huggingface,
  timm_file,
  timm_vit,
  torch,
  transformers,
)

from tests.faults.counts import count, further
from vit_jax.errors import UserError
from vit_jax.models.layers import activate
from vit_jax.weights import pretrained
from vit_jax.weights.metadata import GELUS

VALUES = ['x', 5, -1, 0, 10**9, 1.5, 1e300, float('nan'), True, None]
VALUES += [[], ['x'], [-1, 0], {}, {'x': []}]


def mutations(content):
  """Yields copies of settings with one value replaced, at any depth."""
  for key, value in content.items():
    for other in VALUES:
      yield content | {key: other}
    if isinstance(value, dict):
      for changed in mutations(value):
        yield content | {key: changed}


PROCESSOR = dict(
  do_normalize=True,
  do_center_crop=True,
  size={'height': 20, 'width': 20},
  crop_size={'height': 16, 'width': 16},
  resample=3,
  image_mean=[0.5] * 3,
  image_std=[0.5] * 3,
)
TIMM = dict(
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


@pytest.mark.parametrize('name', sorted(GELUS.keys() - {'gelu_tanh'}))
def test_activations_have_the_names_of_the_library(name):
  """`gelu_tanh` is a name of timm."""
  x = np.linspace(-5, 5, 101, dtype=np.float32)
  theirs = transformers.activations.get_activation(name)(torch.tensor(x))
  ours = activate(jnp.asarray(x), GELUS[name])
  np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
  'project, name',
  [
    ('transformers', 'config'),
    *further(['transformers', 'preprocessor_config'], ['timm', 'config']),
  ],
)
def test_mutated_settings(tmp_path, project, name):
  """Each is accepted, or refused by one message, key by key."""
  if project == 'timm':
    path = timm_file(tmp_path, timm_vit(), TIMM)
  else:
    path = str(tmp_path)
    huggingface().save_pretrained(path)
    (tmp_path / 'preprocessor_config.json').write_text(json.dumps(PROCESSOR))
  file, refused = tmp_path / f'{name}.json', 0
  found = list(mutations(json.loads(file.read_text())))
  limit = min(count(60, 250), len(found))
  for content in random.Random(0).sample(found, limit):
    file.write_text(json.dumps(content))
    try:
      source = pretrained.find(path)
      source.description.transform()
    except UserError as error:
      refused += 1
      assert len(str(error)) < 5000, content
  assert refused > 10
