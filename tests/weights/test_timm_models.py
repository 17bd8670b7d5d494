"""Heads, GELU and preprocessing that no array of timm's files shows."""

import functools

import numpy as np
import pytest
import references
import write_timm_table
from references import HEADS, timm_file, timm_vit, torch

from vit_jax import load_pretrained
from vit_jax.errors import UserError
from vit_jax.weights.formats import tensors, timm, timm_models
from vit_jax.weights.formats.normalization import CLIP, IMAGENET


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
    monkeypatch.setattr(tensors, 'read', lambda path: arrays)
    caplog.clear()
    return timm.load(path).about, caplog

  return load


def heads_and_gelu(about):
  section = about['model']
  return section['num_heads'], section.get('gelu', 'exact')


def test_heads_that_an_array_shows(tmp_path):
  """The norms of queries and keys have one scale for each channel of a head."""
  reference = timm_vit(qk_norm=True)
  model, params = load_pretrained(timm_file(tmp_path, reference))
  assert model.num_heads == HEADS
  references.agree(model, params, reference)


@pytest.mark.slow
def test_the_table_is_the_installed_timms():
  """Whoever updates timm writes the table again."""
  if references.timm.__version__ != timm_models.version():
    pytest.skip('the table is of another timm')
  found = write_timm_table.text(references.timm, torch)
  assert found == timm_models.TABLE.read_text()


@pytest.mark.slow
def test_no_architecture_is_wrong_without_a_word(opened):
  """Each is right by its name; without it, right, refused or warned about."""
  outcomes = dict.fromkeys(('right', 'refused', 'warned'), 0)
  names = [n for n in timm_models.table() if '.' not in n]
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
    about, log = opened(name, 'weights.safetensors')
    warned = [r.getMessage() for r in log.records if r.levelname == 'WARNING']
    if heads_and_gelu(about) == known or about['model'].get('gated'):
      outcomes['right'] += 1
    else:
      outcomes['warned'] += 1
      assert any('assumed:' in text for text in warned), name
  assert sum(outcomes.values()) == len(names) > 200
  assert outcomes['right'] > 120


@pytest.mark.parametrize(
  'name, heads, gelu',
  [
    ('vit_giantopt_patch16_siglip_gap_256', 16, 'tanh'),
    ('vit_so400m_patch16_siglip_256', 16, 'tanh'),
    ('vit_base_patch16_gap_224', 16, 'exact'),
    ('test_vit2', 2, 'exact'),
  ],
)
def test_by_the_name_of_a_file_and_of_the_user(opened, name, heads, gelu):
  """Both name the architecture; the log says where the values are from."""
  for path in (f'{name}.safetensors', f'{name}:weights.safetensors'):
    about, log = opened(name, path)
    assert heads_and_gelu(about) == (heads, gelu)
    assert f'{name} in the table of timm' in log.text
    assert 'WARNING' not in [record.levelname for record in log.records]
    assert about['normalization']['mean'] == [0.5] * 3


def test_assumptions_are_said(opened):
  """Without a name: what was assumed, what else there is, what to do."""
  about, log = opened('vit_base_patch32_siglip_256', 'weights.safetensors')
  assert about['model'].get('gelu', 'exact') == 'exact'
  for words in ('gelu exact', 'tanh in vit_base_patch32_siglip', 'timm:ARCH'):
    assert words in log.text


def test_a_tag_is_evaluated_as_its_own(opened):
  """Weights of one architecture differ in their pixels."""
  tagged = 'vit_base_patch32_clip_224.laion2b_ft_in12k_in1k'
  plain, _ = opened('vit_base_patch32_clip_224', f'{tagged}.safetensors')
  row = timm_models.find(tagged)
  assert plain['normalization']['mean'] == list(row.statistics[0])
  assert timm_models.find('vit_base_patch32_clip_224').statistics == CLIP
  deit = timm_models.find('deit_base_patch16_224.unknown_tag')
  assert deit.statistics == IMAGENET


def test_names_that_timm_does_not_have(opened):
  """The nearest spelling is given."""
  with pytest.raises(UserError, match="vit_base_patch16_22.*'vit_base_patch16"):
    opened('vit_base_patch16_224', 'vit_base_patch16_22:w.safetensors')


def test_architectures_that_no_model_here_is(opened):
  """Rotary embeddings are in no array: only the name shows them."""
  name = 'vit_small_patch16_rope_ape_224'
  with pytest.raises(UserError, match=f'{name}.*EvaBlock'):
    opened(name, f'{name}.safetensors')
  _, log = opened(name, 'weights.safetensors')
  assert 'no rotary position embeddings' in log.text
