"""Tests of the real commands, with correct and wrong arguments."""

import json
import re
import shutil

import cv2
import numpy as np
import pytest
import scipy.ndimage

from tests import cli, tiny_vit
from tests.faults.counts import further
from vit_jax.config import completion, loading
from vit_jax.processes import versions


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Returns the workdir of the small L/16 after 20 steps, with an average."""
  workdir = tmp_path_factory.mktemp('trained') / 'run'
  cli.train(
    workdir,
    devices=2,
    average_decay=0.9,
    source__height=48,
    log__curves=True,
    log__report=True,
  )
  return workdir


@pytest.mark.slow
def test_print_config_prints_a_usable_config(tmp_path):
  """The resolved config can be passed to --config, and nothing is trained.

  A wrong config does not create a workdir, either.
  """
  data = {'source.data_dir': tmp_path / 'tfds'}
  flags = cli.flags('configs/quickstart.py', tmp_path / 'run', data)
  command = cli.command('train', *flags, '--config.batch_size=32')
  out, _ = cli.run([*command, '--print_config'])
  _, err = cli.run([*command, '--config.mesh.data=3'], code=2)
  assert err.count('error:') == 1 and 'Traceback' not in err
  assert not (tmp_path / 'run/config.json').exists()
  file = tmp_path / 'config.json'
  file.write_text(out)
  config = loading.load(str(file))
  assert config.batch_size == 32 and config.checkpoint.keep
  assert completion.to_json(config) == out


@pytest.mark.slow
def test_a_changed_config_is_refused(tmp_path, trained):
  """Operational keys may change; others need --allow_config_change."""
  workdir = tmp_path / 'copy'
  shutil.copytree(trained, workdir)
  changes = {
    'average_decay': 0.9,
    'source.height': 48,
    'model.dropout': 0.2,
    'total': '22 steps',
  }
  again = cli.train_command(workdir, **changes)
  _, err = cli.run(again, code=2)
  assert 'model.dropout: 0.1 before, 0.2 now' in err
  assert "total: '20 steps' before, '22 steps' now" in err
  assert '--allow_config_change' in err
  operational = {'mesh.data': 1, 'model.remat': 'full', 'checkpoint.keep': 4}
  given = [f'--config.{key}={value}' for key, value in operational.items()]
  _, err = cli.run([*again, '--allow_config_change', *given])
  assert 'resuming at step 20' in err
  assert list(cli.losses(workdir)) == list(range(1, 23))
  shorter = [*again, '--config.total=21 steps', '--allow_config_change']
  _, err = cli.run(shorter, code=2)
  assert 'is at step 22, beyond the 21 steps' in err


@pytest.mark.slow
def test_report_and_figures_of_a_run(trained, tmp_path):
  """`analyze` adds figures and predictions to the report."""
  page = trained / 'report.html'
  text = page.read_text()
  for expected in ('20 of 20', 'Training images', '256 of 256 examples'):
    assert expected in text
  assert 'Attention rollout' not in text
  workdir = tmp_path / 'run'
  shutil.copytree(trained, workdir)
  checkpoint = f'--checkpoint={workdir}'
  cli.run(cli.command('analyze', checkpoint, '--num_images=3'))
  text = (workdir / 'report.html').read_text()
  assert 'Attention rollout' in text and '256 of 256 examples' in text
  arrays = np.load(workdir / 'figures' / 'figures.npz')
  assert arrays['distance'].shape == (3, 3, 4)
  assert arrays['similarity'].shape == (2, 2, 2, 2)
  before = json.loads((workdir / 'report.json').read_text())
  (workdir / 'report.json').unlink()
  cli.run(cli.command('analyze', 'report', str(workdir)))
  after = json.loads((workdir / 'report.json').read_text())
  for key in ('accuracy', 'count', 'mistakes', 'matrix'):
    assert after['judged'][key] == before['judged'][key]


@pytest.mark.slow
def test_files_of_a_workdir(trained):
  run = json.loads((trained / 'run.json').read_text())
  assert run['num_devices'] == 2 and run['packages']['jax']
  assert run['commit'] == versions.commit()
  assert any('vit_jax.train' in part for part in run['command'])
  assert json.loads((trained / 'config.json').read_text())['batch_size'] == 32
  assert (trained / 'curves.png').stat().st_size > 10_000
  first = cli.records(trained)[0]
  for key in ('loss', 'lr', 'grad_norm', 'epoch', 'img_per_sec', 'data_wait'):
    assert key in first
  last = cli.records(trained)[-1]
  for name, load in (('val', 'load'), ('val_ema', 'load_average')):
    assert last[f'{name}/count'] == 256
    accuracy, loss = cli.evaluated_independently(trained, load)
    assert last[f'{name}/accuracy'] == accuracy
    assert last[f'{name}/loss'] == pytest.approx(loss, rel=1e-5)
  steps = (trained / 'checkpoints').glob('[0-9]*')
  assert {step.name for step in steps} == {'10', '20'}


@pytest.mark.slow
@pytest.mark.parametrize('devices', [3, *further(1)])
def test_evaluate_repeats_the_results_of_the_run(trained, devices):
  """The result does not depend on the batch size and the number of devices."""
  flags = f'--checkpoint={trained}', '--batch_size=37', '--json'
  out, _ = cli.run(cli.command('evaluate', *flags), devices)
  result, last = json.loads(out), cli.records(trained)[-1]
  assert result['count'] == 256
  assert result['accuracy'] == last['val/accuracy']
  assert result['loss'] == pytest.approx(last['val/loss'], rel=1e-5)
  assert result['ema/accuracy'] == last['val_ema/accuracy']


def assert_start_of_fine_tuning(tuned, body):
  """Checks that 3x4 patches and a zero head were made from 2x2 patches."""
  assert body.keys() - tuned.keys() == {'pre_logits/bias', 'pre_logits/kernel'}
  for path, leaf in tuned.items():
    if path.startswith('head/'):
      assert not leaf.any(), path
    elif path != 'position/embedding':
      np.testing.assert_array_equal(leaf, body[path], err_msg=path)
  old, new = (p['position/embedding'][0] for p in (body, tuned))
  np.testing.assert_array_equal(new[0], old[0])  # the class token
  grid = scipy.ndimage.zoom(old[1:].reshape(2, 2, -1), (1.5, 2, 1), order=1)
  np.testing.assert_allclose(new[1:], grid.reshape(12, -1), atol=1e-6)


@pytest.mark.slow
def test_convert_finetune_and_predict(tmp_path, trained):
  """Weights are converted, and fine-tuned on larger images of 3x4 patches."""
  npz, exported = tmp_path / 'small.npz', tmp_path / 'exported'
  cli.run(cli.command('convert', str(trained), str(npz)))
  cli.run(cli.command('convert', '--weights=ema', str(trained), str(exported)))
  sections = ('source', 'train', 'log', 'num_classes')
  shared = {
    key: value
    for key, value in cli.SMALL_L16.items()
    if key.split('.')[0] in sections
  }
  for number, source in enumerate((npz, exported)):
    workdir = tmp_path / f'tuned{number}'
    flags = {
      **shared,
      'init_from': source,
      'image_size': '(48, 64)',
      'batch_size': 64,
      'total': '5 steps' if source == npz else '20 steps',
      'schedule.warmup': '1 steps',
      'schedule.base_lr': 0.0 if source == npz else 0.03,
      'model.dtype': 'float32',
    }
    command = cli.flags('configs/finetune_imagenet.py', workdir, flags)
    _, err = cli.run(cli.command('finetune', *command), devices=2)
    assert 'position/embedding interpolated (as in the p' in err
    # 2x2 and 3x4 patches, and the class token
    assert re.search(r'\(1, 5, \d+\) to \(1, 13, \d+\)', err), err
    assert 'fresh: head/bias, head/kernel' in err
    losses = cli.losses(workdir)
    # With a zero head, every class is equally likely at first.
    assert losses[1] == pytest.approx(np.log(20), rel=1e-5)
    if source == npz:
      body, tuned = map(cli.final_params, (trained, workdir))
      assert_start_of_fine_tuning(tuned, body)
      assert set(losses.values()) == {losses[1]}
    else:
      assert losses[20] < 0.6 * losses[1]
  image = tmp_path / 'image.png'
  cv2.imwrite(str(image), np.full((30, 50), 128, np.uint8))
  flags = f'--checkpoint={tmp_path}/tuned0', '--json', '--top=3'
  out, _ = cli.run(cli.command('predict', *flags, str(image), str(image)))
  one, other = map(json.loads, out.splitlines())
  values = [each['probability'] for each in one['top']]
  assert one == other and values == sorted(values, reverse=True)
  assert all(each['class'].startswith('class ') for each in one['top'])


@pytest.mark.slow
def test_a_fine_tuning_resumes_without_init_from(tmp_path):
  """The file is needed only if the run starts from the beginning."""
  weights = tmp_path / 'weights.npz'
  tiny_vit.save_classifier(str(weights))
  workdir = tmp_path / 'tuned'
  keys = dict(init_from=weights, batch_size=64, total='4 steps')
  keys |= {'checkpoint.every': '2 steps', 'schedule.warmup': '1 steps'}
  # The weights determine the GELU and whole patches, also when resuming.
  keys |= {'model.gelu': 'quick', 'image_size': 40}
  flags = cli.flags('configs/finetune_quickstart.py', workdir, keys)
  command = cli.command('finetune', *flags)
  cli.run(command)
  before, params = cli.losses(workdir), cli.final_params(workdir)
  shutil.rmtree(workdir / 'checkpoints' / '4')
  weights.rename(tmp_path / 'elsewhere.npz')
  _, err = cli.run(command)
  assert 'does not exist' in err and 'resumes' in err
  assert cli.losses(workdir) == before
  cli.assert_same_params(workdir, params)
  shutil.rmtree(workdir / 'checkpoints')
  _, err = cli.run(command, code=2)
  assert err.rstrip().splitlines()[-1].count('does not exist') == 1


@pytest.mark.long
def test_two_runs_can_prepare_digits_at_once(tmp_path):
  """Both start with an empty TFDS directory, and both train."""
  keys = {'source.data_dir': tmp_path / 'tfds', 'log.tensorboard': 'false'}
  keys |= {'total': '2 steps', 'schedule.warmup': '1 steps'}
  workdirs = tmp_path / 'a', tmp_path / 'b'
  commands = [cli.flags('configs/quickstart.py', w, keys) for w in workdirs]
  for process in [cli.start(cli.command('train', *each)) for each in commands]:
    cli.finish(process)
  for workdir in workdirs:
    assert cli.records(workdir)[-1]['test/count'] == 359
