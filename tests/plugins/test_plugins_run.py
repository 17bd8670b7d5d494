"""Tests of plug-ins outside the package with the ordinary commands.

The files next to this one are written from the contracts only; `lab_config`
uses all of them.
"""

import json
import types

import jax
import numpy as np
import pytest

from tests import cli
from vit_jax import convert
from vit_jax.arrays import sharding, tree
from vit_jax.config import loading
from vit_jax.errors import UserError
from vit_jax.training.experiment import Experiment
from vit_jax.weights import pretrained

pytestmark = pytest.mark.slow

CONFIG = 'tests/plugins/lab_config.py'
FORMAT = 'tests.plugins.lab_weights'


def train(workdir, code=0, command='train', **changes):
  """Runs the lab's config; keys of changes have '__' for '.'."""
  values = {key.replace('__', '.'): value for key, value in changes.items()}
  arguments = cli.flags(CONFIG, workdir, values)
  return cli.run(cli.command(command, *arguments), code=code)


def params_of(path):
  """Returns {path: array} of weights in any format."""
  source = pretrained.find(str(path))
  mesh = sharding.make_mesh(jax.devices()[:1])
  params = source.load(source.abstract_params(mesh))
  return {k: np.asarray(v) for k, v in tree.flatten(params).items()}


def evaluated(path):
  """Returns the results of the command `evaluate`."""
  out, _ = cli.run(cli.command('evaluate', f'--checkpoint={path}', '--json'))
  return json.loads(out)


def evaluations(workdir):
  return [line for line in cli.lines(workdir) if 'lab/accuracy' in line]


def tracked(workdir):
  """Returns what the lab's tracker received, a list for each start."""
  starts = []
  for line in (workdir / 'tracked.jsonl').read_text().splitlines():
    record = json.loads(line)
    if 'identity' in record:
      starts.append([])
    starts[-1].append(record)
  return starts


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
  """Returns a run of 8 steps: its workdir, and a folder of its weights."""
  root = tmp_path_factory.mktemp('lab')
  train(root / 'run')
  convert.run(str(root / 'run'), f'{FORMAT}:{root}/weights.lab')
  return types.SimpleNamespace(
    root=root, run=root / 'run', weights=root / 'weights.lab'
  )


def test_a_run_evaluates_all_weights_of_the_objective(lab):
  """The results of student and teacher differ."""
  assert [line['step'] for line in evaluations(lab.run)] == [4, 8]
  for line in evaluations(lab.run):
    assert line['lab/count'] == line['lab_teacher/count'] == 32
    assert line['lab/confidence'] != line['lab_teacher/confidence']
    assert line['lab/confidence'] != line['lab/confidence_other']
  for line in cli.lines(lab.run):
    assert ('distance' in line) == ('loss' in line)


def test_a_preempted_run_resumes_exactly(lab, tmp_path):
  """It is stopped in the evaluation of step 4; all lines are the same."""
  train(tmp_path, code=42, evals__lab__stops=True)
  assert [line['step'] for line in cli.lines(tmp_path)] == [1, 2, 3, 4]
  _, err = train(tmp_path, log__trackers__lab__fails_from=6)
  assert cli.lines(tmp_path) == cli.lines(lab.run)
  warning = 'the tracker config.log.trackers.lab failed (no network)'
  assert err.count(warning) == err.count('no network') == 1
  first, second = tracked(tmp_path)  # a second start of the same run
  assert first[0]['identity'] == second[0]['identity']
  assert [line['step'] for line in first[1:-1]] == [1, 2, 3, 4]
  assert [line['step'] for line in second[1:-1]] == [4, 5]


def test_a_tracker_receives_all_lines(lab):
  """It also receives the config, and a call at the end."""
  ((head, *lines, end),) = tracked(lab.run)
  assert lines == cli.records(lab.run)
  assert head['name'] == 'run' and head['config']['batch_size'] == 8
  assert head['config']['log.trackers.lab.name'].endswith('lab_tracker')
  assert end == {'closed': True}


def test_frozen_parameters_do_not_change(lab):
  """They are frozen by rules of the config; all others change."""
  before = params_of(lab.run / 'checkpoints' / '4')
  after = params_of(lab.run / 'checkpoints' / '8')
  moved = {k for k in before if not np.array_equal(before[k], after[k])}
  frozen = {'stem/kernel', 'stem/bias'}
  assert frozen < set(before) and moved == set(before) - frozen


@pytest.mark.parametrize('where', ['run', 'weights'])
def test_evaluate_repeats_the_results(lab, where):
  """The weights are a checkpoint or in the lab's format."""
  path = {'run': lab.run, 'weights': f'{FORMAT}:{lab.weights}'}[where]
  found, last = evaluated(path), evaluations(lab.run)[-1]
  for key in ('accuracy', 'count'):
    assert found[key] == last[f'lab/{key}']
  assert ('teacher/accuracy' in found) == (where == 'run')
  names = {'': 'lab'} | ({'teacher/': 'lab_teacher'} if where == 'run' else {})
  for prefix, name in names.items():
    for key in ('confidence', 'confidence_other'):  # sums over other batches
      near = pytest.approx(last[f'{name}/{key}'], rel=1e-5)
      assert found[prefix + key] == near


def test_convert_to_the_lab_format_and_back(lab, tmp_path):
  """The parameters and their description are the same."""
  assert (lab.weights / 'stem.kernel.npy').is_file()
  convert.run(f'{FORMAT}:{lab.weights}', str(tmp_path / 'back'))
  paths = lab.run, tmp_path / 'back'
  jax.tree.map(np.testing.assert_array_equal, *map(params_of, paths))
  before, after = (pretrained.find(str(path)).description for path in paths)
  assert before.to_json() == after.to_json()


def test_convert_selects_the_teacher(lab, tmp_path):
  """Names of weights that the objective does not have are refused."""
  teacher = str(tmp_path / 'teacher')
  convert.run(str(lab.run), teacher, 'teacher')
  found, student = params_of(teacher), params_of(lab.run)
  assert not np.array_equal(found['body/kernel'], student['body/kernel'])
  confidence = evaluations(lab.run)[-1]['lab_teacher/confidence']
  expected = pytest.approx(confidence, rel=1e-5)
  assert evaluated(teacher)['confidence'] == expected
  with pytest.raises(UserError, match="is 'pupil'; allowed: params, tea"):
    convert.run(str(lab.run), str(tmp_path / 'pupil'), 'pupil')


def test_finetune_starts_student_and_teacher_from_the_weights(lab, tmp_path):
  """With a learning rate of 0, body and teacher keep the loaded values."""
  changes = {
    'init_from': f'{FORMAT}:{lab.weights}',
    'total': '4 steps',
    'schedule__base_lr': 0.0,
  }
  train(tmp_path, command='finetune', **changes)
  before, after = params_of(lab.run), params_of(tmp_path)
  for path in ('stem/kernel', 'stem/bias', 'body/kernel', 'body/bias'):
    np.testing.assert_array_equal(after[path], before[path])
  assert not np.array_equal(after['head/kernel'], before['head/kernel'])
  (line,) = evaluations(tmp_path)
  assert line['lab_teacher/confidence'] == line['lab/confidence']


def test_checkpoint_best_accepts_metrics_of_the_teacher():
  """Names of other weights are refused."""
  config = loading.load(CONFIG)
  assert config.checkpoint.best == 'lab_teacher/accuracy'
  config.checkpoint.best = 'lab_pupil/accuracy'
  with pytest.raises(UserError, match='allowed: lab/accuracy, lab_teacher/'):
    Experiment.build(config, jax.devices()[:1])
