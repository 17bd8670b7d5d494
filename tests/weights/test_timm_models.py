"""Tests of heads, GELU and preprocessing that arrays of timm do not show."""

import functools

import numpy as np
import pytest
import references
import write_timm_table
from references import HEADS, timm_file, timm_vit, torch

from tests.faults.counts import count
from vit_jax import load_pretrained
from vit_jax.arrays.pixels import IMAGENET
from vit_jax.errors import UserError
from vit_jax.weights.formats import tensors, timm, timm_models
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
    return timm.load(path).about, caplog

  return load


def heads_and_gelu(about):
  section = about['model']
  return section['num_heads'], section.get('gelu', 'exact')


def test_norms_of_queries_and_keys_determine_the_heads(tmp_path):
  """They have one scale for each channel of a head."""
  reference = timm_vit(qk_norm=True)
  model, params = load_pretrained(timm_file(tmp_path, reference))
  assert model.num_heads == HEADS
  references.agree(model, params, reference)


@pytest.mark.slow
def test_the_table_equals_the_installed_timm():
  """After an update of timm, write it again; CI tests every fifth model."""
  if references.timm.__version__ != timm_models.version():
    pytest.skip('the table is of another timm')
  step = count(5, 1)
  found = write_timm_table.text(references.timm, torch, step).splitlines()
  expected = timm_models.TABLE.read_text().splitlines()
  if step == 1:
    assert found == expected
  assert len(found) >= len(expected) / step and set(found) <= set(expected)


@pytest.mark.slow
def test_every_architecture_is_right_refused_or_warned_about(opened):
  """With its name, each is right; CI tests every fifteenth."""
  step = count(15, 1)
  outcomes = dict.fromkeys(('right', 'refused', 'warned', 'named'), 0)
  rows = timm_models.table().values()
  # Joined matrices of larger models do not fit into the memory.
  small = [row.name for row in rows if '.' not in row.name and row.width < 2000]
  names = small[::step]
  for name in names:
    expected = timm_models.table()[name]
    known = expected.num_heads, expected.gelu
    try:
      about, _ = opened(name, f'timm/{name}.safetensors')
    except UserError:
      outcomes['refused'] += 1
      continue
    assert expected.block in timm_models.SUPPORTED, name
    assert heads_and_gelu(about) == known or about['model'].get('gated'), name
    try:
      about, log = opened(name, 'weights.safetensors')
    except UserError:  # without a name, its positions or norms are not known
      outcomes['named'] += 1
      continue
    warned = [r.getMessage() for r in log.records if r.levelname == 'WARNING']
    if heads_and_gelu(about) == known or about['model'].get('gated'):
      outcomes['right'] += 1
    else:
      outcomes['warned'] += 1
      assert any('assumed:' in text for text in warned), name
  assert sum(outcomes.values()) == len(names) > count(13, 200)
  assert outcomes['right'] > count(6, 120)


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
    about, log = opened(name, path)
    assert heads_and_gelu(about) == (heads, gelu)
    assert f'{name} in the table of timm' in log.text
    assert 'WARNING' not in [record.levelname for record in log.records]
    assert about['normalization']['mean'] == [0.5] * 3


def test_assumptions_are_logged(opened):
  """The warning lists them, and what to do."""
  about, log = opened('vit_base_patch32_siglip_256', 'weights.safetensors')
  assert about['model'].get('gelu', 'exact') == 'exact'
  for words in ('num_heads 12', 'gelu exact', 'timm:ARCH'):
    assert words in log.text


def test_tags_select_their_preprocessing(opened):
  """Weights of one architecture may have different preprocessing."""
  tagged = 'vit_base_patch32_clip_224.laion2b_ft_in12k_in1k'
  plain, _ = opened('vit_base_patch32_clip_224', f'{tagged}.safetensors')
  row = timm_models.find(tagged)
  assert plain['normalization']['mean'] == list(row.statistics[0])
  assert timm_models.find('vit_base_patch32_clip_224').statistics == CLIP
  deit = timm_models.find('deit_base_patch16_224.unknown_tag')
  assert deit.statistics == IMAGENET


def test_unknown_architectures_get_a_suggestion(opened):
  with pytest.raises(UserError, match="vit_base_patch16_22.*'vit_base_patch16"):
    opened('vit_base_patch16_224', 'vit_base_patch16_22:w.safetensors')


def test_unsupported_architectures_are_refused(opened):
  """By the name of their blocks, with the reason."""
  name = 'vit_small_patch16_18x2_224'
  with pytest.raises(
    UserError, match=f'{name}.*not supported: a layer has two'
  ):
    opened(name, f'{name}.safetensors')


@pytest.mark.parametrize(
  'name', ['hiera_base_224', 'cait_s24_224.fb_dist_in1k']
)
def test_models_that_are_not_plain_are_refused(opened, tmp_path, name):
  """By the name in config.json, before arrays are compared."""
  config = dict(architecture=name.partition('.')[0])
  path = timm_file(tmp_path, timm_vit(), config)
  with pytest.raises(UserError, match='not a plain Vision Transformer'):
    load_pretrained(path)


def test_all_rows_are_supported_or_refused_by_name():
  """The same list is in docs/weights.md."""
  for row in timm_models.table().values():
    supported = row.block in timm_models.SUPPORTED
    assert supported != (row.block in timm_models.REFUSED), row
  assert write_timm_table.documented() in write_timm_table.PAGE.read_text()


def test_rotary_positions_need_the_name(opened):
  """They are in no array, so only the name shows them."""
  _, log = opened('vit_small_patch16_rope_ape_224', 'weights.safetensors')
  assert 'no rotary position embeddings' in log.text
  for name in ('vit_small_patch16_dinov3', 'vit_small_patch16_rope_224'):
    with pytest.raises(UserError, match='timm:ARCHITECTURE:PATH'):
      opened(name, 'weights.safetensors')
