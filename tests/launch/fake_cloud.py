"""Substitute for gcloud, with a slice of two workers as directories."""

import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / 'launch'
SLICE = ['--name=vit', '--zone=europe-west4-a', '--project=my-project']
WORKDIR = 'gs://bucket/run'
UP = [
  'up',
  *SLICE,
  '--type=v3-32',
  f'--workdir={WORKDIR}',
  '--config=configs/small.py',
  '--data_dir=gs://bucket/tfds',
]
NASTY = [
  'two words',
  "it's",
  '"; touch pwned; echo "',
  "'; touch pwned; echo '",
  '$(touch pwned) `touch pwned` $HOME ~ * \\',
  'a  b\n\tc',
  'naïve',
  '&& touch pwned #',
]

# Acts like gcloud on the directories worker0 and worker1 next to it.
GCLOUD = """
import json, os, pathlib, shutil, subprocess, sys
here = pathlib.Path(__file__).parent
with (here / 'calls.jsonl').open('a') as file:
  file.write(json.dumps(sys.argv[1:]) + '\\n')
verb, *rest = sys.argv[4:]
flags = dict(a[2:].split('=', 1) for a in rest if '=' in a and a[:2] == '--')
state = here / 'state'
if verb == 'describe':
  sys.exit('NOT_FOUND') if not state.exists() else print(state.read_text())
elif verb == 'create':
  state.write_text('READY')
elif verb == 'delete':
  state.unlink()
worker = flags.get('worker')
chosen = ['0', '1'] if worker == 'all' else [worker] if worker else []
failed = 0
for home in [here / f'worker{i}' for i in chosen]:
  if verb == 'scp':
    shutil.copy(rest[0], home / rest[1].partition(':')[2])
  else:
    line = ['bash', '-c', flags['command']]
    path = f'{here}/stubs:/usr/bin:/bin'
    env = {'HOME': str(home), 'PATH': path}
    failed = subprocess.run(line, cwd=home, env=env).returncode or failed
sys.exit(failed)
"""

# Replaces python3 of a worker, which is only used to install uv.
PYTHON3 = """#!/bin/bash
echo "python3 $*" >>"$HOME/installed"
mkdir -p "$7/bin"
cp "$(dirname "$0")/uv" "$7/bin/uv"
"""

UV = f"""#!/bin/bash
echo "uv $*" >>"$HOME/installed"
if [[ $1 == venv ]]; then
  mkdir -p "${{@: -1}}/bin"
  ln -s {shlex.quote(sys.executable)} "${{@: -1}}/bin/python"
fi
"""

# Records its arguments, and ends with the exit code in a file once it exists.
TRAINER = """
import json, os, pathlib, signal, sys, time
if __name__ == '__main__':
  home = pathlib.Path(os.environ['HOME'])
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
  data_dir = os.environ.get('TFDS_DATA_DIR')
  with (home / 'runs.jsonl').open('a') as file:
    file.write(json.dumps([data_dir, *sys.argv[1:]]) + '\\n')
  print('step 1', flush=True)
  end, deadline = home / 'end', time.monotonic() + 60
  while not end.exists() and time.monotonic() < deadline:
    time.sleep(0.02)
  sys.exit(int(end.read_text()))
"""


def write_program(path: pathlib.Path, text: str) -> None:
  path.parent.mkdir(exist_ok=True)
  path.write_text(text)
  path.chmod(0o755)


def lines(path: pathlib.Path) -> list[list[str]]:
  """Returns the lists in a JSONL file; none if the file does not exist."""
  text = path.read_text() if path.exists() else ''
  return [json.loads(line) for line in text.splitlines()]


def understood(script: str, folder: pathlib.Path) -> list[list[str]]:
  """Returns the commands of a printed script, split into words by `sh`."""
  recorders, record = folder / 'recorders', folder / 'record.jsonl'
  for name in ('gcloud', 'git', 'mkdir'):
    write_program(
      recorders / name,
      f'#!{sys.executable}\nimport json, os, sys\n'
      'argv = [os.path.basename(sys.argv[0]), *sys.argv[1:]]\n'
      f'with open({str(record)!r}, "a") as file:\n'
      '  file.write(json.dumps(argv) + "\\n")\n',
    )
  record.unlink(missing_ok=True)
  subprocess.run(
    [str(shutil.which('sh'))],
    input=script,
    env={'PATH': str(recorders)},
    cwd=folder,
    text=True,
    check=True,
  )
  return lines(record)


def wait_until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
  deadline = time.monotonic() + timeout_s
  while not condition():
    assert time.monotonic() < deadline, 'timed out'
    time.sleep(0.02)


class Cloud:
  """A checkout to launch from, and a gcloud with a slice of two workers."""

  def __init__(self, root: pathlib.Path):
    self.root, self.checkout = root, root / 'checkout'
    self.homes = [root / 'worker0', root / 'worker1']
    for home in self.homes:
      home.mkdir()
    write_program(root / 'gcloud.py', GCLOUD)
    write_program(
      root / 'bin' / 'gcloud',
      f'#!/bin/bash\nexec {shlex.quote(sys.executable)} '
      f'{shlex.quote(str(root / "gcloud.py"))} "$@"\n',
    )
    write_program(root / 'stubs' / 'python3', PYTHON3)
    write_program(root / 'stubs' / 'uv', UV)
    shutil.copytree(LAUNCH, self.checkout / 'launch')
    for name, text in {
      'configs/small.py': '',
      'constraints.txt': '',
      'vit_jax/__init__.py': '',
      'vit_jax/train.py': TRAINER,
    }.items():
      (self.checkout / name).parent.mkdir(exist_ok=True)
      (self.checkout / name).write_text(text)
    self._git('init', '--quiet')
    self.commit_file('.gitignore')

  def _git(self, *arguments: str) -> None:
    name = ['-c', 'user.name=a', '-c', 'user.email=a@example.com']
    subprocess.run(['git', *name, *arguments], cwd=self.checkout, check=True)

  def commit_file(self, name: str) -> None:
    """Commits a new file, and all other changes of the checkout."""
    (self.checkout / name).touch()
    self._git('add', '.')
    quiet = ['--quiet', '--no-verify', '--no-gpg-sign']
    self._git('commit', *quiet, '--message=x')

  def start(self, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
      ['bash', self.checkout / 'launch' / 'tpu_vm.sh', *arguments],
      env={**os.environ, 'PATH': f'{self.root}/bin:{os.environ["PATH"]}'},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      start_new_session=True,  # so that a test can cut the connection
    )

  def __call__(self, *arguments: str) -> tuple[int, str]:
    """Runs a launch; returns its exit code and output."""
    process = self.start(*arguments)
    output, _ = process.communicate(timeout=60)
    return process.returncode, output

  def commit(self) -> str:
    """Returns the newest commit of the checkout."""
    command = ['git', 'rev-parse', 'HEAD']
    return subprocess.check_output(
      command, cwd=self.checkout, text=True
    ).strip()

  def calls(self) -> list[list[str]]:
    return lines(self.root / 'calls.jsonl')

  def runs(self) -> list[list[list[str]]]:
    """Returns data directory and arguments of each job of each worker."""
    return [lines(home / 'runs.jsonl') for home in self.homes]

  def wait_for_runs(self, number: int) -> None:
    wait_until(lambda: all(len(runs) == number for runs in self.runs()))

  def end_jobs(self, code: int, workers: tuple[int, ...] = (0, 1)) -> None:
    """Ends the jobs of the workers with a code, and waits for their end."""
    for home in [self.homes[worker] for worker in workers]:
      (home / 'ending').write_text(str(code))
      (home / 'ending').rename(home / 'end')
      job = home / 'vit_jax_job'
      if job.exists():
        subprocess.run(['flock', job / 'lock', 'true'], check=True, timeout=60)
      (home / 'end').unlink()
