"""Flags of `launch`, and the message for each wrong one."""

import shutil
import sys

import launch_jobs
import pytest
from absl import flags

from tests.command_line import own_flags
from vit_jax.cli import process
from vit_jax.errors import UserError
from vit_jax.launch import __main__ as command
from vit_jax.launch.job import Job, default_name

CLOUD = ['--zone=z', '--project=p']
GS = '--workdir=gs://bucket/run'
TPU = ['--target=tpu', '--topology=v3:4x4', GS, *CLOUD]
GKE = ['--target=gke', '--topology=v6e:4x4', GS, '--image=host/path/vit_jax']
SLURM = ['--target=slurm', '--topology=h100:4x8', '--workdir=/shared/run']


@pytest.fixture
def checkout(tmp_path):
  """Returns a checkout with a committed and an uncommitted config."""
  for name in ('configs/quickstart.py', 'launch/jobset.template'):
    (tmp_path / name).parent.mkdir()
    shutil.copy(launch_jobs.ROOT / name, tmp_path / name)
  launch_jobs.commit_all(tmp_path)
  name = tmp_path / 'configs/uncommitted.py'
  shutil.copy(tmp_path / 'configs/quickstart.py', name)
  return tmp_path


@pytest.fixture
def typed(checkout, monkeypatch):
  """Returns a function that parses arguments; removes their flags later.

  The function returns the arguments that are not flags.
  """
  monkeypatch.chdir(checkout)
  monkeypatch.setattr(command, 'ROOT', checkout)

  def parse(*arguments):
    argv = ['launch', *arguments]
    if not any(word.startswith('--config=') for word in arguments):
      argv.insert(1, '--config=configs/quickstart.py')
    monkeypatch.setattr(sys, 'argv', argv)
    command.define_flags()
    return tuple(flags.FLAGS(sys.argv)[1:])

  with own_flags():
    yield parse


@pytest.fixture
def job_of(typed, checkout):
  """Returns a function from arguments to a job."""
  return lambda *arguments: command.job_of(
    flags.FLAGS, typed(*arguments), checkout
  )


def test_flags_become_a_job(job_of, checkout, capsys):
  (checkout / 'launch/jobset.template').write_text('')
  made = job_of(
    *['--config.batch_size', '64', *GKE, '--slices=2', '--spot'],
    *['--submit_flags=--a', '--submit_flags=--b=c d'],
    *['--config.checkpoint.best=None', '--', '--profile=10:15'],
  )
  assert made == Job(
    target='gke',
    name='quickstart',
    commit=made.commit,
    config='configs/quickstart.py',
    workdir='gs://bucket/run',
    topology='v6e:4x4',
    overrides=('--config.batch_size=64', '--config.checkpoint.best=None'),
    trainer_flags=('--profile=10:15',),
    submit_flags=('--a', '--b=c d'),
    slices=2,
    spot=True,
    image='host/path/vit_jax',
  )
  assert len(made.commit) == 40
  assert 'uncommitted changes' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ([], "--target is ''; allowed: gke, slurm, tpu"),
    (TPU[:-1], 'add --project=PROJECT_ID'),
    ([*SLURM, '--zone=z'], '--zone has no effect with --target=slurm'),
    ([*TPU, 'extra'], "'extra'"),
    ([*TPU, '--name=../x'], "--name is '../x'; allowed: a lower-case"),
    ([*TPU, '--max_restarts=-1'], '--max_restarts is -1; it must be at'),
    ([*TPU, '--topology=v3:44'], "did you mean 'v3:4x4'?"),
    ([*TPU, '--topology=tpu7x:2x2x1'], 'for --target=tpu'),
    ([*GKE, '--topology=v3:4x4', '--slices=2'], '(slices: 2)'),
    ([*SLURM, '--topology=h100:4'], 'give h100:NODESxGPUS'),
    ([*SLURM, '--data_dir=data'], "--data_dir is 'data'; allowed: a path on"),
    ([*SLURM, '--partition=a\nb'], "--partition is 'a\\nb'; it must not"),
    (
      [*TPU, '--config=configs/uncommitted.py'],
      "'configs/uncommitted.py', which is not in the commit",
    ),
    ([*TPU, '--config.batch_sice=3'], "did you mean 'batch_size'"),
  ],
)
def test_errors_state_the_value_and_what_is_allowed(job_of, arguments, message):
  with pytest.raises(UserError) as caught:
    job_of(*arguments)
  assert message in str(caught.value)


def test_other_files_than_those_of_the_commit_are_refused(job_of, checkout):
  """The path of a config must be that in the commit."""
  with pytest.raises(UserError, match='--config is .*not in the commit'):
    job_of(*TPU, f'--config={checkout}/configs/quickstart.py')


def test_a_directory_that_is_not_a_clone_is_refused(job_of, checkout):
  shutil.rmtree(checkout / '.git')
  with pytest.raises(UserError, match='--config is .*not in the commit'):
    job_of(*TPU)


def test_the_command_plans_and_ends_with_the_code_of_the_run(
  typed, monkeypatch, capsys
):
  rest = typed(*TPU, '--config.batch_size=64', '--dry_run')
  planned, answer = [], {'fits': False, 'summary': 'memory  DOES NOT FIT'}

  def plan(words):
    planned.append(words)
    return answer

  monkeypatch.setattr(process, 'plan', plan)
  with pytest.raises(UserError, match='--topology; --noplan starts'):
    command.main([*rest])
  printed = capsys.readouterr().out
  assert '# memory  DOES NOT FIT' in printed and 'gcloud' not in printed
  words = '--config.batch_size=64 --topology=v3:4x4 --slices=1'
  assert planned == [['--config=configs/quickstart.py', *words.split()]]
  answer['fits'] = True
  command.main([*rest])
  monkeypatch.setattr(command, 'run_until_done', lambda job, shell: 43)
  with pytest.raises(SystemExit) as ended:
    command.main([*rest])
  assert ended.value.code == 43 and len(planned) == 3
  flags.FLAGS(['launch', '--noplan', '--delete'])
  with pytest.raises(SystemExit) as ended:
    command.main([*rest])
  assert ended.value.code == 0 and len(planned) == 3
  assert 'queued-resources delete quickstart' in capsys.readouterr().out


def test_an_interruption_leaves_the_job(typed, monkeypatch):
  def interrupted(job, shell):
    raise KeyboardInterrupt

  rest = typed(*TPU, '--noplan', '--dry_run')
  monkeypatch.setattr(command, 'run_until_done', interrupted)
  with pytest.raises(UserError, match='interrupted; the job continues'):
    command.main([*rest])


def test_names_come_from_configs():
  assert default_name('configs/l16_i21k.py') == 'l16-i21k'
  long = default_name('configs/vit.py:variant=R50+L/16,data=' + 'x' * 40)
  assert long.startswith('vit-variant-r50-l-16-data-x') and len(long) == 40
  assert default_name('configs/2022.py') == 'vit-2022'


@pytest.mark.parametrize(
  ('name', 'kind', 'hosts', 'per_host'),
  [
    ('v3:4x4', 'v3-32', 4, 4),
    ('v4:2x2x4', 'v4-32', 4, 4),
    ('v5e:2x4', 'v5litepod-8', 1, 8),
    ('v6e:1x1', 'v6e-1', 1, 1),
    ('v6e:16x16', 'v6e-256', 64, 4),
  ],
)
def test_slices_have_the_sizes_of_google_clouds_tables(
  name, kind, hosts, per_host
):
  job = launch_jobs.changed('tpu', topology=name)
  assert job.machines == (name.partition(':')[0], hosts, per_host)
  assert f'--accelerator-type={kind} ' in launch_jobs.dry_run(job)
