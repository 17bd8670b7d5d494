"""Tests of the predicted cost of a study."""

import re

import pytest

from tests import cli
from tests.plan.test_plan import needs_libtpu
from vit_jax.errors import UserError
from vit_jax.study import __main__ as command
from vit_jax.study import costs
from vit_jax.study.chains import ExtraFlags
from vit_jax.study.contents import Evaluation, Row, Study
from vit_jax.sweeps.grid import Stage

FEW = Evaluation('fewshot', '5shot', 'test')


def row(seeds=(0,), **flags):
  pretrain = Stage('configs/quickstart.py', 'test/accuracy', flags, seeds)
  return Row(pretrain=pretrain, transfers={'5-shot': FEW})


def planned(days, fits=True, **more):
  """Returns a plan for 8 devices, with a range of -20 % to +50 %."""
  return {
    'fits': fits,
    'peak_bytes_per_device': 3 * 2**30,
    'devices': 8,
    'total_steps': 1_000,
    'predicted_step_seconds': 2.0,
    'predicted_step_seconds_range': [1.6, 3.0],
    'predicted_days': days,
    'predicted_core_days': 8 * days,
    'least_days': None,
    **more,
  }


def cells(text, name):
  """Returns the cells of the row with a name."""
  [line] = [each for each in text.splitlines() if each.startswith(f'| {name}')]
  return [cell.strip() for cell in line.strip('|').split('|')][1:]


def test_the_total_is_the_sum_over_rows_and_seeds():
  """Rows with weights cost nothing, and rows that do not fit do not count."""
  study = Study(
    title='s',
    rows={
      'a': row((0, 1, 2), total='9 steps'),
      'b': row(),
      'given': row(),
      'large': row(),
      'none': Row(pretrain=None, transfers={'5-shot': FEW}),
    },
  )
  large = planned(100, fits=False, changes_that_fit={'micro_batches': 4})
  answers, asked = iter([planned(2), planned(0.5), large]), []

  def plan(flags):
    asked.append(flags)
    return next(answers)

  extra = ExtraFlags(['--config.seed=7'], ['--config.source.data_dir=d'])
  found = costs.predict(study, 'v3:2x2', extra, {'given': 'w'}, plan)
  assert asked[0] == [
    '--config=configs/quickstart.py',
    '--config.total=9 steps',
    '--config.seed=0',
    '--config.source.data_dir=d',
    '--config.seed=7',
    '--topology=v3:2x2',
  ]
  assert len(asked) == 3
  text = costs.markdown(study, 'v3:2x2', found)
  assert '| days | core-days |' in text
  assert cells(text, 'a') == [
    '3',
    'yes',
    '3.00 GiB',
    '1,000',
    '2.0000 (1.6000 to 3.0000)',
    '6.00',
    '48.0 (38.4 to 72.0)',
  ]
  assert cells(text, 'given') == cells(text, 'none') == ['0', *['–'] * 6]
  assert cells(text, 'large')[1] == 'no'
  assert 'large fits with --pretrain.micro_batches=4' in text
  total = cells(text, 'total')
  assert total[0] == '4' and total[-2:] == ['6.50', '52.0 (41.6 to 78.0)']
  # Evaluations of three seeds, and of the rows b, given and large.
  assert ' 6 runs and evaluations' in text


def test_lower_bounds_and_unknown_times():
  """Without a compiler the time is a bound; on this machine it is unknown."""
  study = Study(title='s', rows={'a': row((0, 1))})
  unknown = dict.fromkeys(
    (
      'predicted_step_seconds',
      'predicted_step_seconds_range',
    )
    + ('predicted_days', 'predicted_core_days')
  )
  for changes, days, total in (
    (unknown | {'least_days': 0.25}, '≥ 0.50', '≥ 4.0'),
    (unknown, '–', '–'),
  ):
    found = costs.predict(
      study,
      'h100:1x8',
      ExtraFlags(),
      {},
      plan=lambda _, changes=changes: planned(1, **changes),
    )
    text = costs.markdown(study, 'h100:1x8', found)
    assert '| days | GPU-days |' in text
    assert cells(text, 'a')[-3:] == ['–', days, total]
    assert cells(text, 'total')[-2:] == [days, total]
    assert ('docs/gpus.md' in text) == (days != '–')


def test_a_row_that_cannot_be_planned_is_named():
  def plan(flags):
    raise UserError('exit code 2')

  study = Study(title='s', rows={'a': row()})
  with pytest.raises(UserError, match="'a'.*exit code 2"):
    costs.predict(study, 'v3:2x2', ExtraFlags(), {}, plan)


def test_weights_of_unknown_rows_are_refused_before_planning():
  with pytest.raises(UserError, match='--weights=c'):
    command._check_weights(Study(title='s', rows={'a': row()}), {'c': 'x'})


STUDY = """
from vit_jax.study.contents import Row, Study
from vit_jax.sweeps.grid import Stage

def get_study():
  rows = {}
  for depth, examples in ((1, 512), (1, 1024), (2, 1024)):
    flags = {
      'train.split': f'train[:{examples}]', 'train.num_examples': examples,
      'total': '7 steps', 'schedule.warmup': '1 steps', 'batch_size': 64,
      'model.depth': depth, 'model.dtype': 'bfloat16',
    }
    rows[f'{depth} {examples}'] = Row(
      pretrain=Stage('configs/quickstart.py', 'test/accuracy', flags))
  return Study(title='Tiny', rows=rows)
"""


@needs_libtpu
@pytest.mark.slow
def test_rows_with_one_program_compile_it_once(tmp_path, monkeypatch):
  """Nothing is started, and rows of one model have the same cost."""
  file, cache = tmp_path / 'tiny.py', tmp_path / 'cache'
  file.write_text(STUDY)
  monkeypatch.setattr(cli, 'compilation_cache', lambda: str(cache))
  words = [f'--config={file}', f'--workdir={tmp_path / "w"}', '--plan=v3:2x2']
  out, err = cli.run(cli.command('study', *words))
  assert len([*(cache / 'plans').iterdir()]) == 2
  assert err.count('compiling the training step') == 2
  small, large = cells(out, '1 512'), cells(out, '1 1024')
  assert small == large and small[1] == 'yes' and small[3] == '7'
  assert re.match(r'0\.0\d+ \(', small[4])
  assert cells(out, '2 1024')[4] != small[4]
  assert not (tmp_path / 'w').exists()
