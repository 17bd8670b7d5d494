"""Tests of the comparison of a start with its workdir and its checkpoint."""

import copy
import json
import math
from unittest import mock

import jax
import pytest
from etils import epath
from minimal_config import completed
from ml_collections import ConfigDict

from vit_jax.config import completion, identity, keys, schema
from vit_jax.config.schema import EVALS, SECTIONS
from vit_jax.errors import StorageError, UserError
from vit_jax.processes import consensus, versions
from vit_jax.run import ledger, resume

PRINT = {'size': 64, 'class_names': ['cat', 'dog'], 'listing': 'abc'}


def _about(config=None, **fingerprint):
  about = {
    'config': (config or completed()).to_dict(),
    'class_names': PRINT['class_names'],
    'record': resume.record(PRINT | fingerprint, {}),
  }
  return json.loads(json.dumps(about))  # as it is read from a checkpoint


def _check(before, config=None, events=(), allow=False):
  """Returns the notes of a comparison with a checkpoint of step 10."""
  config = config or completed()
  comparison = resume.Comparison(
    epath.Path('runs/x'), _about(config), config, lambda step: before, allow
  )
  with mock.patch.object(ledger, 'read', lambda path: events):
    comparison.compare(10, before)
  return comparison._notes


def test_operational_keys_exist():
  """A misspelt key would not be excluded from the comparison."""
  constructors = [keys.top_level]
  for pattern in (*SECTIONS.values(), EVALS):
    names = schema.names(pattern) if '{name}' in pattern else ['']
    constructors += [schema.resolve(pattern, name) for name in names]
  marked = 0
  for constructor in constructors:
    allowed = schema.config_keys(constructor)
    for name in schema.operational_keys(constructor):
      assert name.split('.')[0] in allowed, (constructor, name)
      marked += 1
  assert marked > 20


def test_members_of_a_mixture_may_move():
  """The paths of the members do not count, only their content."""
  members = {
    'a': {'name': 'folder', 'path': 'x', 'weight': 1.0},
    'b': {'name': 'tfds', 'dataset': 'd', 'data_dir': 'y', 'weight': 1.0},
  }
  config = completed(source={'name': 'mixture', 'members': members})
  prefix = 'source.members.'
  compared = {
    key.removeprefix(prefix)
    for key in identity.identity(config)
    if key.startswith(prefix)
  }
  assert compared > {'a.name', 'a.weight', 'a.endings', 'b.dataset'}
  assert not compared & {'a.path', 'a.class_map', 'b.data_dir', 'b.class_map'}


@pytest.mark.parametrize(
  'key, value, equal, different',
  [
    (
      'total',
      '200 steps',
      ['200 step', '200steps', '2e2 steps', '2_00 steps'],
      ['201 steps', '200 epochs'],
    ),
    ('total', '0.1 epochs', ['0.1 epoch'], ['0.10000000000000002 epochs']),
    ('schedule.warmup', '5 %', ['5%', '5.0 %'], ['5 steps']),
    ('image_size', [16], [[16, 16]], [[16, 17]]),
    ('mine.sizes', [16], [], [[16, 16]]),
    ('mine.threshold', math.nan, [float('nan')], [0.0]),
  ],
)
def test_spellings_of_values(key, value, equal, different):
  """Units in the singular, one number for both sides, NaN and NaN are equal."""
  for other in equal:
    assert not identity.differences({key: value}, {key: other})
  for other in different:
    assert identity.differences({key: value}, {key: other})


@pytest.mark.parametrize(
  'before, now',
  [
    ({}, {}),
    ({'mix.mixup': math.nan}, {'mix.mixup': math.nan}),
    ({}, {'source.data_dir': 'x', 'reader.max_bad_share': 0.5}),
    ({'image_size': 8}, {'image_size': (8, 8)}),
  ],
)
def test_an_unchanged_run_has_no_differences(before, now):
  """Equal NaNs and other readers are not differences."""
  assert _check(_about(completed(**before)), completed(**now)) == []


@pytest.mark.parametrize(
  'change, words',
  [
    ({'size': 63}, 'data: size: 63 before, 64 now'),
    ({'listing': 'abd'}, "data: listing: 'abd' before, 'abc' now"),
    ({'class_names': ['cat', 'zdog']}, "1 only before ('zdog')"),
    ({'class_names': ['dog', 'cat']}, 'the same names in another order'),
  ],
)
def test_other_data_are_refused(change, words):
  """They are refused whatever the config contains."""
  with pytest.raises(UserError, match='runs/x(?s:.*)--allow_config') as error:
    _check(_about(**change))
  assert words in str(error.value)
  [note] = _check(_about(**change), allow=True)
  assert note.kind == 'config_change' and words in note.text


def test_another_setting_of_jax_is_refused():
  """Initialization, dropout or products depend on these settings."""
  for flag in resume._FLAGS:
    assert hasattr(jax.config, flag)
    before = _about()
    before['record']['flags'][flag] = 'other'
    with pytest.raises(UserError, match=f"setting {flag}: 'other' before"):
      _check(before)


def test_a_branch_may_change_its_schedule_and_length():
  """That holds for the step at which it begins, and for no other key."""
  config = completed(total='9 steps', **{'schedule.base_lr': 0.5})
  begins = {'event': 'branch', 'step': 10}
  assert _check(_about(), config, [begins]) == []
  with pytest.raises(UserError, match='(?s)schedule.base_lr.*total'):
    _check(_about(), config, [begins | {'step': 9}])
  with pytest.raises(UserError, match='seed: 0 before, 4 now'):
    _check(_about(), completed(seed=4), [begins])


@pytest.mark.parametrize(
  ('changes', 'position'),
  [
    ({'batch_size': 128}, 'step 10 of 16 (epoch 0.62) now'),
    ({'total': '2 epochs'}, 'step 10 of 64 (epoch 0.31) now'),
    ({'seed': 3}, ''),
  ],
)
def test_an_allowed_change_names_what_it_moves(changes, position):
  """Another batch size changes the epoch, and the number of steps."""
  sizes = {'batch_size': 64, 'train.num_examples': 2048, 'total': '1 epochs'}
  before, config = _about(completed(**sizes)), completed(**sizes | changes)
  [note] = _check(before, config, allow=True)
  assert position in note.text
  is_named = 'position: step 10 of 32 (epoch 0.31) before' in note.text
  assert is_named == bool(position)


def test_unrecorded_values_are_not_compared():
  """Older versions recorded less, and values that are no longer recorded."""
  before = _about()
  before['record']['fingerprint'].pop('listing')
  before['record']['flags'].pop('jax_enable_x64')
  before['record']['fingerprint']['gone'] = 3
  assert _check(before) == []
  before['record']['fingerprint']['class_names'] = ['cat', 'eel']
  with pytest.raises(UserError, match='class_names'):
    _check(before)


def test_changed_evaluators_are_noted():
  """Another split or size is noted; another interval or name is not."""
  old = completed().to_dict()
  harmless = {'evals.test.every': '3 steps', 'evals.test.batch_size': 2}
  other = copy.deepcopy(old)
  other['evals']['other'] = dict(name='classification', split='train')

  def notes(before, config):
    return resume.evaluator_notes(before, config, 5)

  assert notes(old, completed()) == notes({}, completed()) == []
  assert notes(old, completed(**harmless)) == []
  [larger] = notes(old, completed(**{'evals.test.image_size': (32, 32)}))
  assert larger.fields['changes'] == {'image_size': (None, [32, 32])}
  assert notes(old, completion.complete(ConfigDict(other))) == []
  other['evals']['test'] |= dict(split='train', cross_entropy='sigmoid')
  [note] = notes(old, completion.complete(ConfigDict(other)))
  assert note.kind == 'evaluator_change' and note.fields == {
    'step': 5,
    'name': 'test',
    'changes': {
      'split': ('test', 'train'),
      'cross_entropy': (None, 'sigmoid'),
    },
  }
  assert 'evals.test' in note.text and 'split' in note.text


def test_processes_must_agree(monkeypatch):
  """The settings for reading data, and an unknown commit, may differ."""
  monkeypatch.setattr(versions, 'commit', lambda: 'a')
  first = resume._common_values(_about(), completed())
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  monkeypatch.setattr(consensus, 'from_main', lambda answer: first)
  monkeypatch.setattr(consensus, 'gather_text', lambda text: ['', text])

  def check(commit='a', fingerprint=(), **changes):
    about = _about(**dict(fingerprint))
    about['record']['versions']['vit_jax'] = commit
    resume.check_processes(about, completed(**changes))

  check()
  check(commit=None)
  check(reader=dict(threads=3))
  for changes, words in (
    (dict(commit='b'), "versions: vit_jax: 'a' on process 0"),
    (dict(seed=5), 'seed: 0 on process 0, 5 on process 1'),
    (dict(log=dict(every='7 steps')), 'log.every'),
    (dict(fingerprint=dict(listing='b')), "'abc' on process 0, 'b' on"),
  ):
    with pytest.raises(UserError, match=f'(?s)^process 1 .*{words}'):
      check(**changes)


def _check_workdir(folder, allow=False, **changes):
  config = completed(**changes)
  return resume.check_workdir(str(folder), config, allow_changes=allow)


@pytest.mark.parametrize('content', [b'', b'{"seed": 0', b'[]', b'\xff\x00'])
def test_a_damaged_config_json_is_quarantined(tmp_path, content):
  """It is written again; the config is compared with the checkpoint."""
  file = tmp_path / 'config.json'
  file.write_bytes(content)
  path = _check_workdir(tmp_path)
  assert file.read_bytes() == content  # not yet locked
  resume.record_workdir(path, completed(), {'time': 'now'})
  assert (tmp_path / 'config.json.bad').read_bytes() == content
  assert json.loads(file.read_text())['seed'] == 0
  assert json.loads((tmp_path / 'run.json').read_text()) == {'time': 'now'}


def test_a_failed_write_keeps_the_previous_config(tmp_path, monkeypatch):
  """The next start compares with it."""
  path = epath.Path(tmp_path)
  resume.record_workdir(path, completed(), {})
  before = (tmp_path / 'config.json').read_text()
  full = mock.Mock(side_effect=OSError(28, 'No space left on device'))
  monkeypatch.setattr('os.replace', full)
  with pytest.raises(StorageError, match='config.json.*No space left'):
    resume.record_workdir(path, completed(seed=1), {})
  assert (tmp_path / 'config.json').read_text() == before


def test_a_longer_total_is_refused(tmp_path):
  """The message states that a longer total changes the learning rate."""
  resume.record_workdir(epath.Path(tmp_path), completed(total='20 steps'), {})
  _check_workdir(tmp_path, total='20 step')
  _check_workdir(tmp_path, allow=True, total='30 steps')
  with pytest.raises(UserError, match='(?s)--allow_config_.*learning rate'):
    _check_workdir(tmp_path, total='30 steps')
  with pytest.raises(UserError, match='^(?s:(?!.*learning rate))'):
    _check_workdir(tmp_path, seed=5, total='20 steps')


def test_workdirs_that_cannot_be_used_are_refused(tmp_path):
  """If a name is not UTF-8, training would start, but not save."""
  (tmp_path / 'config.json').mkdir()
  with pytest.raises(UserError, match='cannot be read'):
    _check_workdir(tmp_path)
  with pytest.raises(UnicodeEncodeError, match='surrogates not allowed'):
    _check_workdir(f'{tmp_path}/a\udcff')


@pytest.mark.parametrize(
  'config_path, expected',
  [
    ('configs/quickstart.py', 'runs/quickstart'),
    ('configs/vit.py:variant=B/16,data=i1k', 'runs/vit-variant_B16-data_i1k'),
    ('gs://bucket/run/config.json', 'gs://bucket/run'),
    ('config.json', '.'),
    ('saved/other.json', 'runs/other'),
  ],
)
def test_default_workdir(config_path, expected):
  """The name comes from the config file, or from the run's config.json."""
  assert resume.default_workdir(config_path) == expected
