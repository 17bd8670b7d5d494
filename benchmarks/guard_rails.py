"""Records what a checkout computes, and compares the records of two checkouts.

  cd CHECKOUT
  python benchmarks/guard_rails.py record DIR [--sections=configs,models]
    [--old=OLD] [--data_dir=TFDS]
  python benchmarks/guard_rails.py compare DIR_A DIR_B
  python benchmarks/guard_rails.py make-old COMMIT OLD/NAME

Made for changes of the code after which every number must be the same. The
script uses only commands, configs and the documented Python interface, so the
same file records old and new commits: it computes with the package of the
working directory. Sections:

- configs: every shipped config, completed, for the values of its arguments.
- models: initial parameters, outputs and gradients of small models.
- losses: the first losses of each objective and backbone.
- runs: metrics of the quickstart and of 300 steps of configs/cifar10.py (on
  digits of 32 pixels if TFDS does not contain cifar10).
- hlo: the optimized program of configs/l16_i21k.py for v3:4x4, without names
  and source lines (needs libtpu).
- weights: files of timm and Hugging Face with random weights, and of OLD: their
  parameters and logits, and the files that `convert` writes from them.
- resume: runs that earlier commits began are resumed to their end.

`make-old` checks out COMMIT and trains small models in OLD/NAME with its code;
SIGTERM stops some of them half-way. Numbers depend on the machine and on the
versions of JAX, so both records must be made on one machine. `compare` exits
with 1 if there is a difference that EXPLAINED does not list.
"""

import argparse
import base64
import contextlib
import gzip
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from guard_rails_models import OTHERS, SIZES, VITS, write_foreign

# (regular expression for `SECTION NAME`, reason) of intended differences.
EXPLAINED: tuple[tuple[str, str], ...] = ()
# New names of config keys, by the old ones, for configs and models.
RENAMED: dict[str, str] = {}

CONFIGS = pathlib.Path(__file__).with_name('guard_rails_configs.json')
TINY = pathlib.Path(__file__).with_name('guard_rails_tiny.py')
BODY = r'"body":"([^"]*)"'  # a kernel in HLO, MLIR in base64
TIMES = re.compile('sec|wait|time|bytes|mfu|hours|days|memory')
FLAGS = os.environ.get('XLA_FLAGS', '')  # of commands
STEPS = 160  # of the runs of make-old, which are stopped after 50
RESUMED = ('supervised', 'mae', 'dino')
BACKBONES = ('resnet', 'hybrid', 'swin', 'axial_vit', 'axial_resnet')


def digest(array) -> str:
  """Returns checksum, type, shape and two sums of an array, as text."""
  import numpy as np

  array = np.asarray(array)
  bits = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]
  x64 = array.astype(np.float64)
  sums = f'{x64.sum():.9g} {np.abs(x64).sum():.9g}'
  return f'{bits} {array.dtype}{[*array.shape]} {sums}'


def leaves(values, path: str = '') -> dict:
  """Returns {path: leaf} of nested dicts and lists."""
  if isinstance(values, list | tuple):
    values = {str(i): value for i, value in enumerate(values)} or '[]'
  if not hasattr(values, 'items'):
    return {path: values}
  flat = {}
  for key, value in values.items():
    flat |= leaves(value, f'{path}/{RENAMED.get(key, key)}'.strip('/'))
  return flat or {path: '{}'}


def digests(tree, path: str) -> dict[str, str]:
  """Returns {path: digest} of a tree of arrays."""
  return {name: digest(leaf) for name, leaf in leaves(tree, path).items()}


def run(module: str, *arguments: object, check: bool = True, **options):
  """Runs `python -m vit_jax.MODULE` of the working directory."""
  command = [sys.executable, '-m', f'vit_jax.{module}', *map(str, arguments)]
  environment = os.environ | {'PYTHONPATH': os.getcwd(), 'XLA_FLAGS': FLAGS}
  result = subprocess.run(
    command, env=environment, capture_output=True, text=True, **options
  )
  if check and result.returncode:
    raise SystemExit(f'{command} failed:\n{result.stderr[-3000:]}')
  return result


def metrics(workdir: pathlib.Path, name: str, after: int = 0) -> dict:
  """Returns {`NAME STEP KEY`: value} of a run's metrics, without times."""
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return {
    f'{name} {record["step"]} {key}': value
    for record in map(json.loads, lines)
    for key, value in record.items()
    if record['step'] > after and not TIMES.search(key)
  }


def random_arrays(shapes, scale: float = 0.3):
  """Returns normally distributed arrays of these shapes, as nested dicts."""
  import numpy as np

  rng = np.random.default_rng(0)

  def fill(node):
    if hasattr(node, 'items'):
      return {key: fill(node[key]) for key in sorted(node)}
    return rng.normal(0, scale, node.shape).astype(node.dtype)

  return fill(shapes)


def images(*shape: int):
  """Returns random images in [-1, 1]."""
  import numpy as np

  return np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)


def record_configs(options) -> dict:
  """Records every config for all combinations of the listed arguments."""
  del options
  record = {}
  for name, arguments in json.loads(CONFIGS.read_text()).items():
    spec = importlib.util.spec_from_file_location('_config', f'configs/{name}')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for values in itertools.product(*arguments.values()):
      pairs = zip(arguments, values, strict=True)
      text = ','.join(f'{key}={v}' for key, v in pairs if v is not None)
      try:
        config = module.get_config(*([text] if text else []))
      except Exception as error:
        record[f'{name}:{text}'] = f'refused: {type(error).__name__}'
        continue
      for path, value in leaves(config.to_dict(), f'{name}:{text} ').items():
        record[path] = repr(value)
  return record


def record_models(options) -> dict:
  """Records parameters, outputs and gradients of small models."""
  del options
  record = {}
  for section in [dict(name='vit', **SIZES | changes) for changes in VITS]:
    changes = {k: v for k, v in section.items() if SIZES.get(k, ...) != v}
    record |= model_record(section, f'{changes}', (12, 16))
  for section in OTHERS:
    stem = '+stem' if 'stem' in section else ''
    record |= model_record(section, f'{section["name"]}{stem}', (32, 32))
  return record


def model_record(section: dict, name: str, size: tuple[int, int]) -> dict:
  """Records one model, which is built from a section of a config."""
  import jax
  import jax.numpy as jnp

  section = {RENAMED.get(key, key): value for key, value in section.items()}
  kind = section.pop('name')
  for package in ('vit_jax.models', 'examples'):
    with contextlib.suppress(ModuleNotFoundError):
      module = importlib.import_module(f'{package}.{kind}')
      break
  try:
    model = module.Model(3, **section)
  except TypeError:  # older commits have fewer keys
    return {f'{name} refused': 'TypeError'}
  print(f'  {name}', flush=True)
  x, key = images(2, *size, 3), jax.random.key(7)
  initial = jax.jit(model.init)(jax.random.key(0), x)['params']
  record = digests(initial, f'{name} initial')
  params = random_arrays(initial)
  weights = jax.random.normal(jax.random.key(2), (2, 3))
  wanted = ('tokens', 'layers', 'attention', 'heads') if kind == 'vit' else ()

  def outputs(params):
    return model.apply({'params': params}, x, None, wanted, method='predict')

  def loss(params):
    logits = model.apply({'params': params}, x, key)
    return jnp.sum(logits * weights)

  record |= digests(jax.jit(outputs)(params), f'{name} outputs')
  return record | digests(jax.jit(jax.grad(loss))(params), f'{name} gradients')


def train(workdir: pathlib.Path, argument: str, *flags, command='train'):
  """Trains the small config of this script."""
  run(command, f'--config={TINY}:{argument}', f'--workdir={workdir}', *flags)


def record_losses(options) -> dict:
  """Records three steps of each objective and backbone."""
  record = {}
  teacher = f'--config.objective.teacher={options.temporary / "supervised"}'
  source = f'--config.init_from={options.temporary / "mae"}'
  kinds = {f'objective={o}': () for o in (*RESUMED, 'masked_patch', 'mixing')}
  kinds |= {f'model={model}': () for model in BACKBONES}
  kinds |= {'objective=distill': (teacher,), 'objective=linear': (source,)}
  for argument, flags in kinds.items():
    name = argument.partition('=')[2]
    command = 'finetune' if name == 'linear' else 'train'
    workdir = options.temporary / name
    train(workdir, argument, *flags, command=command)
    record |= metrics(workdir, name)
  return record


def record_runs(options) -> dict:
  """Records the metrics of the quickstart and of 300 steps on CIFAR-10."""
  quickstart = options.temporary / 'quickstart'
  run('train', '--config=configs/quickstart.py', f'--workdir={quickstart}')
  record = metrics(quickstart, 'quickstart')
  folder = pathlib.Path(options.data_dir or '~/tensorflow_datasets')
  flags = [f'--config.source.data_dir={folder}']
  if not (folder.expanduser() / 'cifar10').exists():
    flags = ['--config.source.dataset=digits']
  cifar10 = options.temporary / 'cifar10'
  run(
    'train',
    '--config=configs/cifar10.py',
    f'--workdir={cifar10}',
    '--config.total=300 steps',
    '--config.schedule.warmup=50 steps',
    '--config.log.every=20 steps',
    *flags,
  )
  record['data'] = flags[0].rpartition('=')[2]
  return record | metrics(cifar10, 'vit')


def record_hlo(options) -> dict:
  """Records the optimized program of the main job, and its predicted cost."""
  path = options.temporary / 'step.hlo'
  result = run(
    'plan',
    '--config=configs/l16_i21k.py',
    '--topology=v3:4x4',
    '--json',
    f'--hlo={path}',
  )
  text = without_names(path.read_text())
  (options.directory / 'hlo.txt.gz').write_bytes(
    gzip.compress(text.encode(), mtime=0)
  )
  planned = leaves(json.loads(result.stdout))
  record = {k: v for k, v in planned.items() if 'compile' not in k}
  return record | {'program': hashlib.sha256(text.encode()).hexdigest()}


def without_names(text: str) -> str:
  """Returns HLO without source lines; names are numbered in order of use."""
  text = re.sub(r',? ?\bmetadata=\{(?:"(?:[^"\\]|\\.)*"|[^{}"])*\}', '', text)
  text = re.sub(r'^HloModule [^,]*', 'HloModule', text)
  tables = r'^(FileNames|FunctionNames|FileLocations|StackFrames)\n(\d+ .*\n)*'
  text = re.sub(tables, '', text, flags=re.MULTILINE)
  bodies = {body: kernel_digest(body) for body in re.findall(BODY, text)}
  text = re.sub(BODY, lambda match: f'"body":"{bodies[match[1]]}"', text)
  # Parameters in the heads of computations are written without a %.
  lines = [
    re.sub(r'[\w.-]+: ', '', line) if line.endswith('{') else line
    for line in text.splitlines()
  ]
  numbers: dict[str, str] = {}
  return re.sub(
    r'%[\w.-]+',
    lambda match: numbers.setdefault(match[0], f'%{len(numbers)}'),
    '\n'.join(lines),
  )


def kernel_digest(body: str) -> str:
  """Returns the checksum of a Mosaic kernel without source lines."""
  from jax._src.lib import tpu
  from jaxlib.mlir import ir

  context = ir.Context()
  context.allow_unregistered_dialects = True
  tpu.register_dialect(context)
  module = ir.Module.parse(base64.b64decode(body), context)
  text = module.operation.get_asm(enable_debug_info=False)
  return hashlib.sha256(text.encode()).hexdigest()


def record_weights(options) -> dict:
  """Records what files of weights contain, and what `convert` writes."""
  paths = write_foreign(options.temporary)
  old = pathlib.Path(options.old) if options.old else None
  if old is not None:
    files = sorted(old.glob('*/weights/*'))
    paths |= {str(f.relative_to(old)): f for f in files if f.suffix != '.json'}
  record = {}
  for name, path in paths.items():
    record |= loaded(path, name)
  conversions = {
    'timm_vit_base_patch16_224': ('a.npz', 'huggingface:b', 'c.safetensors'),
    'timm_swin': ('d.safetensors', 'huggingface:e'),
    'hf_Dinov2': ('f.safetensors', 'g'),
    'timm_vit_base_patch16_siglip_224': ('big_vision:h.npz',),
  }
  for name, targets in conversions.items():
    for target in targets:
      prefix, colon, file = target.rpartition(':')
      path = options.temporary / file
      target_path = f'{prefix}{colon}{path}'
      result = run('convert', paths[name], target_path, check=False)
      record[f'{name} to {target} exit code'] = result.returncode
      record |= loaded(path, f'{name} to {target}')
      record |= arrays_of(path, f'{name} to {target} file')
  return record


def arrays_of(path: pathlib.Path, name: str) -> dict[str, str]:
  """Records the arrays of a file, or of the file in a directory."""
  import numpy as np
  import safetensors.numpy

  if (path / 'model.safetensors').exists():
    path /= 'model.safetensors'
  if path.suffix == '.npz':
    return digests(dict(np.load(path)), name)
  if path.suffix == '.safetensors':
    return digests(safetensors.numpy.load_file(path), name)
  return {}


def loaded(path: pathlib.Path, name: str, **keys) -> dict[str, str]:
  """Records parameters and logits of weights, through `load_pretrained`."""
  import jax

  from vit_jax import load_pretrained

  large = re.search('(?i)swin|resnet|hybrid', name)
  size = keys.get('image_size', 32 if large else 16)
  try:
    model, params = load_pretrained(str(path), **keys)
    apply = jax.jit(lambda p, x: model.apply({'params': p}, x))
    logits = apply(params, images(2, size, size, 3))
  except Exception as error:
    # Messages may change, and contain the path.
    return {f'{name} refused': type(error).__name__}
  record = digests(params, f'{name} params')
  record[f'{name} logits'] = digest(logits)
  if size == 16:
    record |= loaded(path, f'{name} at 24 pixels', image_size=24)
  return record


def record_resume(options) -> dict:
  """Records how the runs of earlier commits go on."""
  record = {}
  for config in sorted(pathlib.Path(options.old).glob('*/tiny.py')):
    for objective in RESUMED:
      name = f'{config.parent.name} {objective}'
      old, workdir = config.parent / objective, options.temporary / name
      record |= loaded(old, f'{name} before')
      shutil.copytree(old, workdir)
      result = run(
        'train',
        f'--config={config}:objective={objective},steps={STEPS}',
        f'--workdir={workdir}',
        check=False,
      )
      record[f'{name} exit code'] = result.returncode
      if result.returncode:
        print(result.stderr[-500:])
      record |= metrics(workdir, name, after=last_step(old))
      record |= loaded(workdir, f'{name} after')
  return record


def last_step(workdir: pathlib.Path) -> int:
  """Returns the last step in a run's metrics; 0 if there are none."""
  path = workdir / 'metrics.jsonl'
  lines = path.read_text().splitlines() if path.exists() else []
  return max((json.loads(line)['step'] for line in lines), default=0)


def make_old(commit: str, folder: pathlib.Path) -> None:
  """Makes workdirs and weights with the code of a commit."""
  folder = folder.resolve()
  folder.mkdir(parents=True)
  config = shutil.copy(TINY, folder / 'tiny.py')
  with tempfile.TemporaryDirectory() as checkout:
    subprocess.run(
      ['git', 'worktree', 'add', '--detach', checkout, commit], check=True
    )
    environment = os.environ | {'PYTHONPATH': checkout}
    python = [sys.executable, '-m']
    options = dict(cwd=checkout, env=environment)
    try:
      for objective in RESUMED:
        workdir = folder / objective
        flag = f'--config={config}:objective={objective},steps={STEPS}'
        command = [*python, 'vit_jax.train', flag, f'--workdir={workdir}']
        with subprocess.Popen(command, **options) as process:
          while process.poll() is None and last_step(workdir) < 50:
            time.sleep(0.02)
          process.send_signal(signal.SIGTERM)
        if process.returncode != 42:
          raise SystemExit(f'{objective} ended with {process.returncode}')
      (folder / 'weights').mkdir()
      for model in ('vit', 'hybrid', 'resnet', 'swin'):
        workdir = pathlib.Path(checkout) / 'runs' / model
        flag = f'--config={config}:model={model},steps=4'
        command = [*python, 'vit_jax.train', flag, f'--workdir={workdir}']
        subprocess.run(command, check=True, **options)
        file = 'swin.safetensors' if model == 'swin' else f'{model}.npz'
        path = folder / 'weights' / file
        command = [*python, 'vit_jax.convert', workdir, path]
        subprocess.run(command, check=True, **options)
    finally:
      subprocess.run(['git', 'worktree', 'remove', '--force', checkout])


SECTIONS = {
  'configs': record_configs,
  'models': record_models,
  'losses': record_losses,
  'weights': record_weights,
  'resume': record_resume,
  'runs': record_runs,
  'hlo': record_hlo,
}


def cache_compilations() -> None:
  """Keeps compiled programs, because the second record has the same ones."""
  import jax

  folder = pathlib.Path.home() / '.cache/vit_jax/guard_rails'
  jax.config.update('jax_compilation_cache_dir', str(folder))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


def record(options) -> None:
  """Writes one JSON file per section."""
  sys.path.insert(0, os.getcwd())
  # Small models in this process compile faster without optimization.
  os.environ['XLA_FLAGS'] = f'{FLAGS} --xla_backend_optimization_level=0'
  cache_compilations()
  options.directory.mkdir(parents=True, exist_ok=True)
  for name in options.sections.split(','):
    if name == 'resume' and not options.old:
      print('resume: left out, because --old is not given')
      continue
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
      options.temporary = pathlib.Path(temporary)
      try:
        values = SECTIONS[name](options)
      except SystemExit as error:  # a command failed
        values = {'failed': str(error)}
        print(error)
    path = options.directory / f'{name}.json'
    path.write_text(json.dumps(values, indent=0, sort_keys=True))
    seconds = time.monotonic() - started
    print(f'{name}: {len(values)} values, {seconds:.0f} s', flush=True)


def compare(a: pathlib.Path, b: pathlib.Path) -> int:
  """Prints the differences of two records; returns the exit code."""
  unexplained = 0
  for name in SECTIONS:
    paths = [folder / f'{name}.json' for folder in (a, b)]
    if not all(path.exists() for path in paths):
      print(f'{name}: not compared, as it is not in both records')
      continue
    x, y = (json.loads(path.read_text()) for path in paths)
    missing = '(missing)'
    keys = [
      key
      for key in sorted({*x, *y})
      if x.get(key, missing) != y.get(key, missing)
    ]
    reasons = {
      key: reason
      for key in keys
      for pattern, reason in EXPLAINED
      if re.search(pattern, f'{name} {key}')
    }
    print(
      f'{name}: {len(x)} values, {len(keys)} differences, '
      f'{len(reasons)} explained'
    )
    for reason in sorted({*reasons.values()}):
      print(f'  explained: {reason}')
    new = [key for key in keys if key not in reasons]
    groups: dict[tuple[str, str, str], list[str]] = {}  # equal changes
    for key in new:
      change = (str(each.get(key, missing)) for each in (x, y))
      groups.setdefault((key.rpartition(' ')[2], *change), []).append(key)
    for (_, old, current), names in list(groups.items())[:20]:
      more = f' and {len(names) - 1} more' if len(names) > 1 else ''
      print(f'  {names[0]}{more}\n    {old}\n    {current}')
    if len(groups) > 20:
      print(f'  … and {len(groups) - 20} other changes')
    unexplained += len(new)
  return int(unexplained > 0)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  commands = parser.add_subparsers(dest='command', required=True)
  command = commands.add_parser('record')
  command.add_argument('directory', type=pathlib.Path)
  command.add_argument('--sections', default=','.join(SECTIONS))
  command.add_argument('--old', help='directory with the results of make-old')
  command.add_argument('--data_dir', default=os.environ.get('TFDS_DATA_DIR'))
  command = commands.add_parser('compare')
  command.add_argument('a', type=pathlib.Path)
  command.add_argument('b', type=pathlib.Path)
  command = commands.add_parser('make-old')
  command.add_argument('commit')
  command.add_argument('directory', type=pathlib.Path)
  options = parser.parse_args()
  if options.command == 'record':
    record(options)
  elif options.command == 'compare':
    sys.exit(compare(options.a, options.b))
  else:
    make_old(options.commit, options.directory)


if __name__ == '__main__':
  main()
