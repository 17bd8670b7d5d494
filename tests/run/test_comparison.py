"""Tests of the comparison of a resumed run with its checkpoint."""

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
from vit_jax.errors import UserError
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


def _check(before, now=None, events=(), allow=False, config=None):
  config = config or completed()
  current = now or _about(config)
  comparison = resume.Comparison(
    epath.Path('runs/x'), current, config, lambda step: before, allow
  )
  with mock.patch.object(ledger, 'read', lambda path: events):
    comparison.compare(10, before)
  return comparison._notes


def _constructors():
  """Returns every class that a section can name in this package."""
  patterns = [*SECTIONS.values(), EVALS]
  for pattern in patterns:
    if '{name}' not in pattern:
      yield schema.resolve(pattern)
      continue
    for name in schema.names(pattern):
      yield schema.resolve(pattern, name)
  yield keys.top_level


def test_operational_keys_exist():
  """A misspelt key would not be excluded from the resume."""
  marked = 0
  for constructor in _constructors():
    keys = schema.config_keys(constructor)
    for name in schema.operational_keys(constructor):
      assert name.split('.')[0] in keys, (constructor, name)
      marked += 1
  assert marked > 20


def test_members_of_a_mixture_may_move():
  """The paths of the members do not count, only their content."""
  members = {
    'a': {'name': 'folder', 'path': 'x', 'weight': 1.0},
    'b': {'name': 'tfds', 'dataset': 'd', 'data_dir': 'y', 'weight': 1.0},
  }
  config = completed(source={'name': 'mixture', 'members': members})
  keys = {k for k in identity.identity(config) if k.startswith('source.')}
  stay = {
    'source.name',
    *(f'source.members.a.{key}' for key in ('name', 'weight', 'endings')),
    *(f'source.members.b.{key}' for key in ('name', 'weight', 'dataset')),
  }
  assert stay < keys
  moved = ('a.path', 'a.class_map', 'b.data_dir', 'b.class_map')
  assert not keys & {f'source.members.{key}' for key in moved}


def test_an_unchanged_run_has_no_differences():
  """Equal NaNs and other readers are not differences."""
  assert _check(_about()) == []
  config = completed(**{'mix.mixup': float('nan')})
  assert _check(_about(config), config=config) == []
  moved = completed(**{'source.data_dir': 'x', 'reader.max_bad_share': 0.5})
  assert _check(_about(), config=moved) == []


@pytest.mark.parametrize(
  'change, words',
  [
    ({'size': 63}, 'data: size: 63 before, 64 now'),
    ({'listing': 'abd'}, "data: listing: 'abd' before, 'abc' now"),
    (
      {'class_names': ['cat', 'zdog']},
      "data: class_names: 2 before, 2 now; 1 only before ('zdog'), 1 only now",
    ),
    ({'class_names': ['dog', 'cat']}, 'the same names in another order'),
  ],
)
def test_other_data_are_refused(change, words):
  """They are refused whatever the config contains."""
  with pytest.raises(UserError) as error:
    _check(_about(**change))
  assert words in str(error.value) and 'runs/x' in str(error.value)
  assert '--allow_config_change' in str(error.value)
  (note,) = _check(_about(**change), allow=True)
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
  assert _check(_about(), events=[begins], config=config) == []
  with pytest.raises(UserError, match='(?s)schedule.base_lr.*total'):
    _check(_about(), events=[begins | {'step': 9}], config=config)
  with pytest.raises(UserError, match='seed: 0 before, 4 now'):
    _check(_about(), events=[begins], config=completed(seed=4))


@pytest.mark.parametrize(
  ('changes', 'positions'),
  [
    (
      {'batch_size': 128},
      'step 10 of 32 (epoch 0.31) before, step 10 of 16 (epoch 0.62) now',
    ),
    (
      {'total': '2 epochs'},
      'step 10 of 32 (epoch 0.31) before, step 10 of 64 (epoch 0.31) now',
    ),
    ({'seed': 3}, ''),
  ],
)
def test_an_allowed_change_names_what_it_moves(changes, positions):
  """Another batch size changes the epoch, and the number of steps."""
  sizes = {'batch_size': 64, 'train.num_examples': 2048, 'total': '1 epochs'}
  before, config = _about(completed(**sizes)), completed(**sizes | changes)
  (note,) = _check(before, config=config, allow=True)
  assert positions in note.text
  assert ('position' in note.text) == bool(positions)


def test_unrecorded_values_are_not_compared():
  """Older versions recorded less."""
  before, now = _about(), _about()
  before['record']['fingerprint'].pop('listing')
  before['record']['flags'].pop('jax_enable_x64')
  before['record']['fingerprint']['gone'] = (
    3  # a value that is no longer recorded
  )
  assert _check(before, now) == []
  before['record']['fingerprint']['class_names'] = ['cat', 'eel']
  with pytest.raises(UserError, match='class_names'):
    _check(before, now)


def test_changed_evaluators_are_noted():
  """Another split or loss is noted; another interval or name is not."""
  old = completed().to_dict()
  assert resume.evaluator_notes(old, completed(), 5) == []
  assert resume.evaluator_notes({}, completed(), 5) == []
  harmless = {'evals.test.every': '3 steps', 'evals.test.batch_size': 2}
  assert resume.evaluator_notes(old, completed(**harmless), 5) == []
  changed = copy.deepcopy(old)
  changed['evals']['other'] = dict(name='classification', split='train')
  assert resume.evaluator_notes(old, _completed(changed), 5) == []
  changed['evals']['test']['split'] = 'train'
  changed['evals']['test']['cross_entropy'] = 'sigmoid'
  (note,) = resume.evaluator_notes(old, _completed(changed), 5)
  assert note.kind == 'evaluator_change' and note.fields == {
    'step': 5,
    'name': 'test',
    'changes': {
      'split': ('test', 'train'),
      'cross_entropy': (None, 'sigmoid'),
    },
  }
  assert 'evals.test' in note.text and 'split' in note.text


def _completed(values):
  return completion.complete(ConfigDict(values))


def test_processes_must_agree(monkeypatch):
  """The settings for reading data, and an unknown commit, may differ."""
  monkeypatch.setattr(versions, 'commit', lambda: 'a')
  first = resume._common_values(_about(), completed())
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(jax, 'process_index', lambda: 1)
  monkeypatch.setattr(consensus, 'from_main', lambda answer: first)
  monkeypatch.setattr(consensus, 'gather_text', lambda text: ['', text])

  def check(about=None, commit='a', **changes):
    about = about or _about()
    about['record']['versions']['vit_jax'] = commit
    resume.check_processes(about, completed(**changes))

  check()
  check(commit=None)
  check(reader=dict(threads=3))
  with pytest.raises(UserError, match='process 1 .*process 0'):
    check(commit='b')
  for changes in (dict(seed=5), dict(log=dict(every='7 steps'))):
    with pytest.raises(UserError, match='process 1 .*process 0'):
      check(**changes)
  with pytest.raises(
    UserError, match="listing: 'abc' on process 0, 'b' on process 1"
  ):
    check(_about(listing='b'))


def test_equal_spellings():
  """Units in the singular, one number for both sides, NaN and NaN."""
  for key, *values in (
    ('total', '200 steps', '200 step', '200steps', '2e2 steps', '2_00 steps'),
    ('schedule.warmup', '5 %', '5%', '5.0 %'),
    ('schedule.warmup', '0.5 epochs', '0.5 epoch'),
    ('image_size', [16], [16, 16]),
    ('mine.threshold', math.nan, float('nan')),
  ):
    for value in values:
      assert not identity.differences({key: values[0]}, {key: value})
  written = json.loads(completion.to_json(completed(image_size=8)))
  assert not identity.changes(written, completed(image_size=(8, 8)))


@pytest.mark.parametrize(
  'key, one, other',
  [
    ('total', '200 steps', '201 steps'),
    ('total', '200 steps', '200 epochs'),
    ('schedule.warmup', '5 %', '5 steps'),
    ('total', '0.1 epochs', '0.10000000000000002 epochs'),
    ('image_size', [16], [16, 17]),
    ('mine.sizes', [16], [16, 16]),
    ('mine.threshold', math.nan, 0.0),
    ('source.dataset', 'cifar10', 'cifar100'),
    ('seed', 1, 2),
  ],
)
def test_different_values_stay_different(key, one, other):
  assert identity.differences({key: one}, {key: other})
