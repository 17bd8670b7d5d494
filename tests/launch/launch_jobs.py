"""Jobs, and programs that replace gcloud, kubectl, docker and SLURM on PATH."""

import dataclasses
import itertools
import json
import pathlib
import shlex
import shutil
import subprocess
import sys

from vit_jax.launch import __main__ as command
from vit_jax.launch.job import Job
from vit_jax.launch.shell import Shell

ROOT = pathlib.Path(__file__).parents[2]
_COMMON = dict(
  name='l16-i21k',
  commit='0123456789abcdef0123456789abcdef01234567',
  config='configs/l16_i21k.py',
  workdir='gs://my-bucket/l16',
  data_dir='gs://my-bucket/tfds',
  overrides=('--config.batch_size=2048',),
)
_TPU = dict(target='tpu', zone='europe-west4-a', project='my-project')
JOBS = {
  'tpu': Job(topology='v3:4x4', **_TPU, **_COMMON),
  'slices': Job(topology='v5e:4x8', slices=2, spot=True, **_TPU, **_COMMON),
  'gke': Job(
    target='gke',
    topology='v6e:4x4',
    slices=2,
    spot=True,
    image='europe-docker.pkg.dev/my-project/images/vit_jax',
    service_account='trainer',
    **_COMMON,
  ),
  'slurm': Job(
    target='slurm',
    topology='h100:4x8',
    partition='gpu',
    account='vision',
    submit_flags=('--qos=high',),
    trainer_flags=('--profile=100:110',),
    **_COMMON,
  ),
}
NASTY = [
  'two words',
  "it's",
  '"; touch pwned; echo "',
  "'; touch pwned; echo '",
  '$(touch pwned) `touch pwned` $HOME ~ * \\',
  '$(HOME) $$(HOME) $$$(HOME) $',
  'a  b\n\tc @name',
  'naïve # & : - { 🙂',
  '&& touch pwned #',
]


def changed(name, **changes):
  """Returns one of the jobs with other values."""
  return dataclasses.replace(JOBS[name], **changes)


def run(job, shell, pause=None):
  """Runs a job without pauses; an endless loop is an error."""
  number = itertools.count()

  def check_end(seconds):
    assert next(number) < 50

  return command.run_until_done(job, shell, pause or check_end)


def dry_run(job):
  """Returns the output of a dry run."""
  lines = []
  assert run(job, Shell(root=ROOT, dry_run=True, echo=lines.append)) == 0
  return '\n'.join(lines).replace(sys.executable, 'python') + '\n'


# Records its arguments. Its output and exit code are those of the first row of
# answers.json whose words are among its arguments. Otherwise gcloud copies
# files to the directories in hosts/ and runs commands there.
_PROGRAM = """#!{python} -SE
import json, os, pathlib, sys
here = pathlib.Path(__file__).resolve().parent
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
with (here / 'calls.jsonl').open('a') as file:
  file.write(json.dumps(words) + '\\n')
answers = here / 'answers.json'
rows = json.loads(answers.read_text()) if answers.exists() else []
for row in rows:
  if set(row['words']) <= set(words):
    output, code, error = row['turns'][0]
    if len(row['turns']) > 1:
      row['turns'].pop(0)
    answers.write_text(json.dumps(rows))
    print(output)
    print(error, file=sys.stderr)
    sys.exit(code)
hosts = sorted(here.parent.glob('hosts/*'))
if hosts:
  import shutil, subprocess
if '--node=0' in words:
  hosts = hosts[:1]
codes, image = [0], here.parent / 'image'
for home in hosts:
  if 'scp' in words:
    shutil.copy(words[5], home / words[6].partition(':')[2])
  if 'ssh' in words:
    (line,) = [w.partition('=')[2] for w in words if w[:10] == '--command=']
    env = dict(HOME=str(home), PATH=f'{{image}}:/usr/bin:/bin')
    done = subprocess.run(['bash', '-c', line], cwd=home, env=env)
    codes.append(done.returncode)
sys.exit(max(codes))
"""
_PROGRAMS = (
  'docker gcloud git kubectl mkdir python rm sbatch scancel squeue srun'
)

# python3 of a host, which only installs uv, and uv.
_IMAGE = {
  'python3': '#!/bin/bash\nmkdir -p "$7/bin"\n'
  'cp "$(dirname "$0")/uv" "$7/bin/"\n',
  'uv': '#!/bin/bash\necho "uv $*" >>"$HOME/installed"\n'
  'if [[ $1 == venv ]]; then mkdir -p "${@: -1}/bin"\n'
  f'ln -s {shlex.quote(sys.executable)} "${{@: -1}}/bin/python"; fi\n',
}
# Ends with the next number in the file `codes`, or else when it gets SIGTERM.
_TRAINER = """
import json, os, pathlib, signal, sys, time
if __name__ == '__main__':
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
  home = pathlib.Path(os.environ['HOME'])
  with (home / 'runs.jsonl').open('a') as file:
    file.write(json.dumps([os.environ['TFDS_DATA_DIR'], *sys.argv[1:]]) + '\\n')
  print('step 1', flush=True)
  if (home / 'codes').exists():
    code, *rest = (home / 'codes').read_text().split()
    (home / 'codes').write_text(' '.join(rest))
    sys.exit(int(code))
  time.sleep(60)
"""


def write_program(path, text):
  """Writes an executable file."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text)
  path.chmod(0o755)


def lines(path):
  """Returns the values in a JSONL file; none if the file does not exist."""
  text = path.read_text() if path.exists() else ''
  return [json.loads(line) for line in text.splitlines()]


class Programs:
  """Replaced programs in bin/, a checkout to launch from, and TPU hosts."""

  def __init__(self, root, monkeypatch):
    self.root, self.checkout, self.bin = root, root / 'checkout', root / 'bin'
    self.output = []
    for name in [*_PROGRAMS.split(), 'scontrol', 'tar', 'touch']:
      write_program(self.bin / name, _PROGRAM.format(python=sys.executable))
    python = self.checkout / 'build/l16-i21k/venv/bin/python'
    python.parent.mkdir(parents=True)
    python.symlink_to(self.bin / 'python')
    monkeypatch.setenv('PATH', str(self.bin))
    monkeypatch.setattr(sys, 'executable', 'python')

  @property
  def shell(self):
    """Returns a shell of the checkout that prints to `output`."""
    return Shell(root=self.checkout, dry_run=False, echo=self.output.append)

  def answer(self, words, *turns):
    """Sets (output, code, error) of calls with these words, in turn."""
    file = self.bin / 'answers.json'
    rows = json.loads(file.read_text()) if file.exists() else []
    rows.append({'words': words.split(), 'turns': turns})
    file.write_text(json.dumps(rows))

  def states(self, *states):
    """Sets the states of the queued resource, one per question."""
    missing = ('', 1, 'ERROR: (gcloud.x) NOT_FOUND: no such resource')
    turns = [(state, 0, '') if state else missing for state in states]
    self.answer('gcloud describe', *turns)

  def calls(self):
    """Returns the words of all calls."""
    return lines(self.bin / 'calls.jsonl')

  def verbs(self):
    """Returns the verbs of the calls of gcloud that change something."""
    verbs = [call[4] for call in self.calls() if call[0] == 'gcloud']
    return [verb for verb in verbs if verb not in ('describe', 'ssh', 'scp')]

  def make_hosts(self, monkeypatch, number=2):
    """Makes hosts and a repository whose trainer they can run; returns both."""
    for name in ('git', 'mkdir'):
      (self.bin / name).unlink()
    monkeypatch.setenv('PATH', f'{self.bin}:/usr/bin:/bin')
    for name, text in _IMAGE.items():
      write_program(self.root / 'image' / name, text)
    shutil.copytree(ROOT / 'launch', self.checkout / 'launch')
    for name in (
      'configs/l16_i21k.py',
      'constraints.txt',
      'vit_jax/__init__.py',
    ):
      write_program(self.checkout / name, '')
    (self.checkout / 'vit_jax/train.py').write_text(_TRAINER)
    commit = commit_all(self.checkout)
    hosts = [self.root / 'hosts' / str(index) for index in range(number)]
    for home in hosts:
      home.mkdir(parents=True)
    return hosts, commit


def commit_all(checkout):
  """Makes a repository of a directory, and returns its commit."""
  git = ['git', '-c', 'user.name=a', '-c', 'user.email=a@example.com']
  commit = ['commit', '--quiet', '--no-verify', '--no-gpg-sign', '--message=x']
  for words in (['init', '--quiet'], ['add', '.'], commit):
    subprocess.run([*git, *words], cwd=checkout, check=True)
  head = ['git', 'rev-parse', 'HEAD']
  return subprocess.check_output(head, cwd=checkout, text=True).strip()
