"""Tests of heads, GELU and preprocessing that arrays of timm do not show."""

import functools

import numpy as np
import pytest
import references
from references import CLASSES, timm_file, timm_vit, torch

from benchmarks import write_timm_table, write_weights_page
from tests.cli import ROOT
from tests.faults.counts import count
from vit_jax.arrays.pixels import IMAGENET
from vit_jax.errors import UserError
from vit_jax.weights.formats import (
  huggingface,
  tensors,
  timm,
  timm_models,
)
from vit_jax.weights.patch_embedding import CLIP


@pytest.fixture
def opened(monkeypatch, caplog):
  """Returns (description, log) of an architecture's arrays under a path."""
  caplog.set_level('INFO', 'vit_jax')

  @functools.lru_cache(maxsize=1)
  def arrays_of(name):
    with torch.device('meta'):
      model = references.timm.create_model(name)
    return {
      name: np.broadcast_to(np.float32(0), tuple(tensor.shape))
      for name, tensor in model.state_dict().items()
    }

  def load(name, path):
    arrays = arrays_of(name)
    monkeypatch.setattr(tensors, 'read', lambda path: (arrays, {}))
    caplog.clear()
    return timm.load(path).description, caplog

  return load


@pytest.mark.slow
def test_the_table_equals_the_installed_timm():
  """After an update of timm, write it again; CI tests 1 % of the models."""
  if references.timm.__version__ != timm_models.version():
    pytest.skip('the table is of another timm')
  step = count(100, 1)
  found = write_timm_table.text(references.timm, torch, step).splitlines()
  expected = timm_models.TABLE.read_text().splitlines()
  if step == 1:
    assert found == expected
  assert len(found) >= len(expected) / step and set(found) <= set(expected)


@pytest.mark.parametrize(
  'name, heads, gelu',
  [
    ('vit_giantopt_patch16_siglip_gap_256', 16, 'tanh'),
    ('vit_so400m_patch16_siglip_256', 16, 'tanh'),
    ('vit_base_patch16_gap_224', 16, 'exact'),
    ('test_vit2', 2, 'exact'),
  ],
)
def test_file_name_and_prefix_name_the_architecture(opened, name, heads, gelu):
  """The log says where the values are from."""
  for path in (f'{name}.safetensors', f'{name}:weights.safetensors'):
    description, log = opened(name, path)
    section = description.model
    assert section['num_heads'] == heads
    assert section.get('gelu', 'exact') == gelu
    assert f'{name} in the table of timm' in log.text
    assert 'WARNING' not in [record.levelname for record in log.records]
    assert description.statistics[0] == (0.5,) * 3


@pytest.mark.parametrize(
  'name', ['vit_base_patch32_siglip_256', 'vit_small_patch16_rope_ape_224']
)
def test_assumptions_are_logged(opened, name):
  """The warning lists them, and what to do."""
  description, log = opened(name, 'weights.safetensors')
  for words in (
    f'num_heads {description.model["num_heads"]}, gelu exact',
    'no rotary position embeddings',
    'timm:ARCH',
  ):
    assert words in log.text


def test_tags_select_their_preprocessing(opened):
  """Weights of one architecture may have different preprocessing."""
  tagged = 'vit_base_patch32_clip_224.laion2b_ft_in12k_in1k'
  plain, _ = opened('vit_base_patch32_clip_224', f'{tagged}.safetensors')
  row = timm_models.find(tagged)
  assert plain.statistics[0] == tuple(row.statistics[0])
  assert timm_models.find('vit_base_patch32_clip_224').statistics == CLIP
  deit = timm_models.find('deit_base_patch16_224.unknown_tag')
  assert deit.statistics == IMAGENET


@pytest.mark.parametrize(
  'name, path, words',
  [
    ('', 'vit_base_patch16_22:w.safetensors', "_22.*'vit_base_patch16_"),
    ('', 'vit_small_patch16_rope_mixed_224:w.safetensors', 'rope.freqs'),
    ('vit_small_patch16_18x2_224', '', 'not supported: a layer has two'),
    ('vit_small_patch16_dinov3', 'w.safetensors', 'timm:ARCHITECTURE:PATH'),
    ('vit_small_patch16_rope_224', 'w.safetensors', 'timm:ARCHITECTURE:PATH'),
  ],
)
def test_architectures_are_refused_by_name(opened, name, path, words):
  """With a suggestion, the reason, or the remedy."""
  with pytest.raises(UserError, match=words):
    opened(name or 'vit_base_patch16_224', path or f'{name}.safetensors')


def test_a_directory_with_a_colon_is_not_an_architecture(tmp_path, monkeypatch):
  timm_file(tmp_path / 'run:2', timm_vit())
  monkeypatch.chdir(tmp_path)
  assert timm.load('run:2/model.safetensors').description.num_classes == CLASSES


PAGE = (ROOT / 'docs' / 'weights.md').read_text()


def test_the_page_contains_the_table_of_the_code():
  """Otherwise, run write_weights_page.py."""
  assert write_weights_page.START in PAGE
  assert write_weights_page.page(PAGE) == PAGE
  for kind in huggingface.TYPES:
    assert f'| Hugging Face `{kind}`' in PAGE
