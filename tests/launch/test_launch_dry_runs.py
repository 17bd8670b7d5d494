"""Tests of dry runs, and of how a shell, Kubernetes and SLURM read them."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import failure_policy
import launch_jobs
import pytest
import schema_check
from fake_cloud import NASTY
from manifest_schema import JOBSET

from vit_jax.errors import UserError
from vit_jax.launch import clusters, gke, planning, slurm

ROOT = launch_jobs.ROOT


@pytest.mark.parametrize('target', launch_jobs.JOBS)
def test_dry_runs_equal_the_golden_files(target):
  """`python tests/launch/launch_jobs.py` writes the golden files again."""
  printed = launch_jobs.dry_run(launch_jobs.JOBS[target])
  assert printed == (launch_jobs.GOLDEN / f'{target}.txt').read_text()


def test_a_dry_run_writes_no_file():
  before = set(ROOT.glob('build/*'))
  launch_jobs.dry_run(launch_jobs.changed('gke', name='never-written'))
  assert set(ROOT.glob('build/*')) == before


@pytest.mark.parametrize('target', ['tpu-vm', 'queued'])
@pytest.mark.parametrize('text', NASTY)
def test_a_shell_splits_commands_into_the_given_words(target, text):
  """Printed commands split into the trainer's arguments again."""
  nasty = (f'--config.x={text}', text)
  job = launch_jobs.changed(
    target, overrides=nasty, workdir=f'gs://bucket/{text}', data_dir=None
  )
  printed = launch_jobs.dry_run(job)
  verb = 'up' if target == 'tpu-vm' else 'start'
  start = printed.index(f'bash launch/tpu_vm.sh {verb}')
  words = shlex.split(printed[start:], comments=False)
  at = words.index('--')
  assert tuple(words[at + 1 : at + 3]) == nasty
  assert f'--workdir=gs://bucket/{text}' in words[:at]


@pytest.mark.parametrize('text', NASTY)
def test_a_batch_script_passes_the_given_words(tmp_path, text):
  nasty = (f'--config.x={text}', text)
  job = launch_jobs.changed(
    'slurm', overrides=nasty, trainer_flags=(), data_dir=f'/data/{text}'
  )
  done, calls, environment = _run_script(tmp_path, slurm.script(job, 300), [0])
  assert done.returncode == 0, done.stderr
  ((program, *words),) = calls
  assert (program, tuple(words[-2:])) == ('srun', nasty)
  assert environment == f'/data/{text}'
  assert not list(tmp_path.rglob('pwned'))


@pytest.mark.parametrize('text', [*NASTY, '$(HOME) $$(HOME) $$$(HOME) $'])
def test_kubernetes_passes_the_given_words(text):
  job = launch_jobs.changed('gke', overrides=(text,), data_dir=f'gs://{text}')
  manifest = json.loads(json.dumps(gke.jobset(job, 300)))
  (container,) = _pod(manifest)['containers']
  assert failure_policy.expanded(container['command'][-1]) == text
  value = failure_policy.expanded(container['env'][0]['value'])
  assert value == f'gs://{text}'


def _pod(manifest):
  (replicated,) = manifest['spec']['replicatedJobs']
  return replicated['template']['spec']['template']['spec']


@pytest.mark.parametrize(
  'name', ['v3:4x4', 'v4:2x2x4', 'v6e:1x1', 'tpu7x:2x2x1']
)
def test_manifests_have_the_fields_of_the_api(name):
  for changes in ({}, {'spot': False, 'service_account': None}):
    where = clusters.tpu(name)
    manifest = gke.jobset(
      launch_jobs.changed('gke', topology=where, **changes), 300
    )
    assert schema_check.errors(manifest, JOBSET) == []
    (replicated,) = manifest['spec']['replicatedJobs']
    assert replicated['replicas'] == 2
    spec = replicated['template']['spec']
    assert spec['parallelism'] == spec['completions'] == where.hosts


def test_the_schema_refuses_a_misspelt_field():
  manifest = gke.jobset(launch_jobs.JOBS['gke'], 300)
  _pod(manifest)['terminationGraceSeconds'] = 1
  manifest['spec']['failurePolicy']['rules'][0]['action'] = 'Fail'
  first, second = schema_check.errors(manifest, JOBSET)
  assert "'Fail' is none of" in first
  assert second.endswith('terminationGraceSeconds: no such field')


def test_yaml_reads_the_manifest():
  yaml = pytest.importorskip('yaml')
  printed = launch_jobs.dry_run(
    launch_jobs.changed('gke', overrides=tuple(NASTY))
  )
  text = launch_jobs.script_of(printed, 'build/l16-i21k/jobset.json')
  assert yaml.safe_load(text) == json.loads(text)


@pytest.mark.parametrize(
  'failure, then',
  [
    (42, 'RestartJobSetAndIgnoreMaxRestarts'),
    (failure_policy.DISRUPTED, 'RestartJobSetAndIgnoreMaxRestarts'),
    *[(code, 'RestartJobSet') for code in (1, 44, 45, 134, 137, 143)],
    *[(code, 'FailJobSet') for code in (2, 43)],
  ],
)
def test_what_the_cluster_does_after_a_failure(failure, then):
  manifest = gke.jobset(launch_jobs.JOBS['gke'], 300)
  assert failure_policy.action(manifest, failure) == then


def test_the_grace_period_is_long_enough_to_save():
  """10 GB per chip and 4 chips per host at 100 MB/s, after 180 s."""
  sizes = {'parameters': 2e9, 'optimizer': 4e9, 'average': 4e9, 'batch': 9e9}
  grace_s = planning.grace_s({'bytes': sizes}, per_host=4)
  assert 180 + 4 * 10e9 / 100e6 <= grace_s < 180 + 4 * 10e9 / 100e6 + 60
  assert planning.grace_s(None, 4) == 300
  manifest = gke.jobset(launch_jobs.JOBS['gke'], grace_s)
  assert _pod(manifest)['terminationGracePeriodSeconds'] == grace_s
  script = slurm.script(launch_jobs.JOBS['slurm'], grace_s)
  assert f'#SBATCH --signal=TERM@{grace_s}\n' in script


# Records its arguments; ends with the next exit code in a file.
_SRUN = """#!{python}
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
name = os.path.basename(sys.argv[0])
with (here / 'calls.jsonl').open('a') as file:
  file.write(json.dumps([name, *sys.argv[1:]]) + '\\n')
if name == 'srun':
  (here / 'data_dir').write_text(os.environ.get('TFDS_DATA_DIR', ''))
  codes = json.loads((here / 'codes').read_text())
  (here / 'codes').write_text(json.dumps(codes[1:]))
  sys.exit(codes[0])
"""


def _run_script(tmp_path, script, codes):
  """Starts a batch script once; returns its end and the commands it ran."""
  folder = tmp_path / 'bin'
  folder.mkdir(exist_ok=True)
  for name in ('srun', 'scontrol'):
    (folder / name).write_text(_SRUN.format(python=sys.executable))
    (folder / name).chmod(0o755)
  (folder / 'codes').write_text(json.dumps(codes))
  (folder / 'calls.jsonl').write_text('')
  (tmp_path / 'build/l16-i21k').mkdir(parents=True, exist_ok=True)
  done = subprocess.run(
    [str(shutil.which('bash')), '-c', script],
    env={
      'PATH': f'{folder}:{os.environ["PATH"]}',
      'SLURM_SUBMIT_DIR': str(tmp_path),
      'SLURM_JOB_ID': '7',
    },
    capture_output=True,
    text=True,
    timeout=60,
  )
  text = (folder / 'calls.jsonl').read_text()
  calls = [json.loads(line) for line in text.splitlines()]
  return done, calls, (folder / 'data_dir').read_text()


_REQUEUED = [['scontrol', 'requeue', '7']]


@pytest.mark.parametrize(
  'code, ends, then',
  [
    (0, 0, []),
    (42, 0, _REQUEUED),
    *[(code, 0, _REQUEUED) for code in (1, 44, 45, 134, 137)],
    *[(code, code, []) for code in (2, 43)],
  ],
)
def test_what_the_batch_script_does_after_a_code(tmp_path, code, ends, then):
  script = slurm.script(launch_jobs.JOBS['slurm'], 300)
  done, calls, _ = _run_script(tmp_path, script, [code])
  assert (done.returncode, calls[1:]) == (ends, then), done.stderr


def test_the_batch_script_counts_failures_and_no_preemptions(tmp_path):
  job = launch_jobs.changed('slurm', max_restarts=2)
  script = slurm.script(job, 300)
  codes = [42, 1, 42, 42, 45, 42, 1]
  ended = [_run_script(tmp_path, script, [code]) for code in codes]
  assert [bool(calls[1:]) for _, calls, _ in ended] == [True] * 6 + [False]
  assert ended[-1][0].returncode == 1
  assert 'after 2 restarts' in ended[-1][0].stderr


def test_the_batch_script_stops_when_asked(tmp_path):
  (tmp_path / 'build/l16-i21k').mkdir(parents=True)
  (tmp_path / 'build/l16-i21k/stop').touch()
  script = slurm.script(launch_jobs.JOBS['slurm'], 300)
  done, calls, _ = _run_script(tmp_path, script, [42])
  assert (done.returncode, len(calls)) == (42, 1)


def test_what_does_not_fit_is_not_started():
  def too_large(job):
    answer = {'changes_that_fit': {'micro_batches': 4}}
    return launch_jobs.plan(job) | {'fits': False} | answer

  for target, job in launch_jobs.JOBS.items():
    with pytest.raises(UserError, match='--topology.*--force'):
      launch_jobs.dry_run(job, plan=too_large)
    printed = launch_jobs.dry_run(job, plan=too_large, force=True)
    assert 'DOES NOT FIT' in printed
    assert 'it fits with --config.micro_batches=4' in printed
    golden = (launch_jobs.GOLDEN / f'{target}.txt').read_text()
    assert printed.splitlines()[-1] == golden.splitlines()[-1]


def test_force_starts_without_a_plan():
  def none(job):
    raise UserError('libtpu is not installed')

  with pytest.raises(UserError, match='libtpu'):
    launch_jobs.dry_run(launch_jobs.JOBS['gke'], plan=none)
  printed = launch_jobs.dry_run(launch_jobs.JOBS['gke'], plan=none, force=True)
  assert (
    'because of --force' in printed and 'libtpu is not installed' in printed
  )


def test_plan_is_asked_about_what_will_run(monkeypatch):
  """The plan gets all flags of the program; its last line is the result."""

  def run(command, **options):
    assert command[1:] == [
      '-m',
      'vit_jax.plan',
      '--json',
      '--config=configs/l16_i21k.py',
      '--config.batch_size=2048',
      '--topology=v6e:4x4',
      '--slices=2',
    ]
    return subprocess.CompletedProcess(command, code, 'a log\n{"fits": true}\n')

  monkeypatch.setattr(subprocess, 'run', run)
  code = 0
  assert planning.predict(launch_jobs.JOBS['gke']) == {'fits': True}
  code = 2
  with pytest.raises(UserError, match='exit code 2.*--force'):
    planning.predict(launch_jobs.JOBS['gke'])


@pytest.mark.parametrize('file', ['tpu', 'cuda'])
def test_containers_are_made_of_what_a_commit_has(file):
  text = (ROOT / f'launch/Dockerfile.{file}').read_text()
  copied = re.findall(r'^COPY (.*) \S+$', text, flags=re.MULTILINE)
  for name in ' '.join(copied).split():
    assert (ROOT / name).exists(), name
  extra = {'tpu': 'tpu', 'cuda': 'gpu'}[file]
  setup = (ROOT / 'setup.py').read_text()
  needed = re.findall(rf"'{extra}': \['(.*)'\]", setup)
  assert len(needed) == 1 and f"'{needed[0]}'" in text
  assert f"--editable='.[{extra}]'" in text
  assert text.count('--constraint=constraints.txt') == text.count('pip install')
  constraints = (ROOT / 'constraints.txt').read_text().splitlines()
  (version,) = re.findall(r'^FROM python:([\d.]+)-slim$', text, re.MULTILINE)
  assert f'(Python {version}, CPU)' in constraints[0]
  # A pinned compiler would conflict with the version that JAX requires.
  pinned = [line for line in constraints if re.match('libtpu|nvidia', line)]
  assert not pinned


def _shellcheck():
  beside = str(pathlib.Path(sys.executable).parent)
  return shutil.which('shellcheck') or shutil.which('shellcheck', path=beside)


@pytest.mark.skipif(not _shellcheck(), reason='shellcheck is not installed')
def test_shellcheck_has_nothing_to_say(tmp_path):
  job = launch_jobs.changed(
    'slurm', data_dir='/data/$x', overrides=tuple(NASTY)
  )
  (tmp_path / 'job.sbatch').write_text(slurm.script(job, 300))
  # The quoted text looks as if it should be expanded or escaped.
  own = ['--exclude=SC2016,SC1003', str(tmp_path / 'job.sbatch')]
  for files in (own, sorted(map(str, (ROOT / 'launch').glob('*.sh')))):
    done = subprocess.run(
      [str(_shellcheck()), '--external-sources', *files],
      cwd=ROOT,
      capture_output=True,
      text=True,
    )
    assert (done.returncode, done.stdout) == (0, '')


def test_the_cost_on_gpus_is_in_gpu_days():
  """The paper's TPU core-days next to it are named as such."""
  modelled = {'kernels': {'product': {}}}
  assert '129 core-days (paper: 230)' in planning.summary(launch_jobs.PLAN)
  assert '129 GPU-days (paper, TPUv3 core-days: 230)' in planning.summary(
    launch_jobs.PLAN | modelled
  )
