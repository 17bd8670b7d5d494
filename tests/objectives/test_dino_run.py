"""Tests of DINO with the real commands."""

import json
import math
import signal

import numpy as np
import pytest
from etils import epath
from small_dino import SMALL

from tests import cli
from vit_jax import analyze, load_pretrained
from vit_jax.arrays import tree

CONFIG = 'configs/dino.py'


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_equals_an_uninterrupted_one(tmp_path):
  """Both sets of weights are evaluated."""
  straight, killed = tmp_path / 'straight', tmp_path / 'killed'
  cli.run(cli.command('train', *cli.flags(CONFIG, straight, SMALL)))
  again = cli.command('train', *cli.flags(CONFIG, killed, SMALL))
  process = cli.start(again)
  cli.wait_for_step(killed, 7, [process])
  process.send_signal(signal.SIGKILL)
  process.communicate()
  cli.run(again)
  assert cli.lines(killed) == cli.lines(straight)
  trained = [line for line in cli.lines(straight) if 'loss' in line]
  assert [line['step'] for line in trained] == list(range(1, 41))
  for line in trained:
    assert 0 < line['entropy_share'] <= 1 and line['teacher_kl'] > 0
    assert line['teacher_entropy'] == pytest.approx(
      line['entropy_share'] * math.log(32), rel=1e-5
    )
  *_, last = (line for line in cli.lines(straight) if 'knn_teacher/5nn' in line)
  out, _ = cli.run(
    cli.command(
      'evaluate',
      f'--checkpoint={killed}',
      '--evaluator=neighbours',
      '--split=validation',
      '--config.evals.neighbours.ks=5',
      '--json',
    )
  )
  scores = json.loads(out)
  assert scores['5nn'] == last['knn/5nn']
  assert scores['teacher/5nn'] == last['knn_teacher/5nn']


@pytest.mark.slow
@pytest.mark.long
def test_commands_use_the_teacher(tmp_path):
  """Fine-tunes, converts and draws the teacher's weights."""
  trained = tmp_path / 'trained'
  cli.run(cli.command('train', *cli.flags(CONFIG, trained, SMALL)))
  tuned, exported = tmp_path / 'tuned', tmp_path / 'exported'
  keys = {
    **{
      k: v for k, v in SMALL.items() if k.startswith(('source', 'train', 'log'))
    },
    'num_classes': 4,
    'image_size': 16,
    'init_from': trained,
    'init_weights': 'teacher',
    'batch_size': 16,
    'total': '2 steps',
    'schedule.warmup': '1 steps',
    'schedule.base_lr': 0.0,
    'model.dtype': 'float32',
  }
  tune = cli.flags('configs/finetune_imagenet.py', tuned, keys)
  cli.run(cli.command('finetune', *tune))
  cli.run(
    cli.command('convert', '--weights=teacher', str(trained), str(exported))
  )
  taught = tree.flatten(load_pretrained(str(exported))[1])
  body = cli.final_params(tuned)
  for path, leaf in taught.items():
    np.testing.assert_array_equal(body[path], leaf, err_msg=path)
  arguments = str(trained), epath.Path(tmp_path / 'drawn'), [], 4
  drawn = analyze.run(*arguments, weights='teacher').arrays
  of_file = analyze.run(str(exported), *arguments[1:]).arrays
  students = analyze.run(*arguments).arrays
  for key in ('filters', 'heads'):
    np.testing.assert_array_equal(drawn[key], of_file[key])
    assert (drawn[key] != students[key]).any()


@pytest.mark.slow
def test_a_limit_ends_the_run(tmp_path):
  """The exit code is 43; what was saved stays."""
  limit = {
    'recovery.limits.alike.at_least': 0.99,  # features never differ as much
    'recovery.limits.alike.during': '3 steps',
    'recovery.limits.alike.stop': 'true',
  }
  command = cli.command(
    'train', *cli.flags(CONFIG, tmp_path / 'run', SMALL | limit)
  )
  _, err = cli.run(command, code=43)
  assert 'alike: feature_deviation is' in err and 'Traceback' not in err
  (event,) = cli.events(tmp_path / 'run', 'limit')
  assert (event['metric'], event['step']) == ('feature_deviation', 3)
