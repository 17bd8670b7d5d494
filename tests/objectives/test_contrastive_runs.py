"""Tests of whole runs with images and texts."""

import pytest

from tests import cli

RUN = {
  'total': '12 steps',
  'batch_size': 32,
  'micro_batches': 2,
  'log.every': '1 steps',
  'log.report': 'false',
  'log.curves': 'false',
  'checkpoint.every': '3 steps',
  'evals.zero.every': '6 steps',
  'model.depth': 1,
  'objective.text.depth': 1,
}


@pytest.mark.long
def test_a_killed_run_is_exact_and_two_processes_equal_one(tmp_path):
  """Losses, accuracies and parameters, with micro-batches."""

  def train(name):
    flags = cli.flags('configs/lit_toy.py', tmp_path / name, RUN)
    return cli.command('train', *flags)

  straight, killed, two = (tmp_path / n for n in ('straight', 'killed', 'two'))
  cli.run(train('straight'))
  file = killed / 'metrics.jsonl'
  cli.kill_when(
    train('killed'),
    lambda: file.exists() and '"step": 5,' in file.read_text(),
    'a run with images and texts',
    timeout_s=240,
  )
  cli.run(train('killed'))
  assert cli.lines(killed) == cli.lines(straight)
  cli.assert_same_params(killed, straight)

  for process in cli.start_group(train('two')):
    cli.finish(process)
  one = cli.losses(straight)
  assert [*one] == [*range(1, 13)]
  assert cli.losses(two) == pytest.approx(one, rel=1e-5)
  accuracies = [
    [r['zero/accuracy'] for r in cli.records(w) if 'zero/accuracy' in r]
    for w in (straight, two)
  ]
  assert accuracies[0] == pytest.approx(accuracies[1], abs=0.01)
  assert len(accuracies[0]) == 2
