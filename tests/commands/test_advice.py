"""Tests that the advice of messages works, and that what it names exists."""

import ast
import contextlib
import re
import shutil

import numpy as np
import pytest
from PIL import Image
from tiny_vit import save_classifier

from tests import cli
from tests.command_line import message_of
from tests.docs.test_docs import MAIN_FLAGS
from vit_jax.config import schema
from vit_jax.config.keys import top_level
from vit_jax.plan import compile
from vit_jax.training.session import Session

# Each row starts a command, which takes about a second.
pytestmark = pytest.mark.slow

QUICK = ('train', '--config=configs/quickstart.py')
FOLDER = ('train', '--config=configs/folder.py:path=good')
DINO = ('train', '--config=configs/dinov2_folder.py:path=good')
SMALL_DINO = (*DINO, '--config.batch_size=8', '--config.evals.knn.ks=10,')
MAE = (
  *QUICK,
  '--config.objective.name=mae',
  '--config.evals.test.name=figures',
)
MAE = (*MAE, '--config.evals.test.split=test')
HEADLESS = '--config.num_classes=0'
TUNE = ('finetune', '--config=configs/finetune_quickstart.py')
PLAN = ('plan.main', '--config=configs/quickstart.py')
LAUNCH = ('launch.__main__', QUICK[1], '--dry_run', '--noplan')
TINY = '--checkpoint=tiny.npz'
DIGITS = ('--dataset=digits', '--split=test[:16]')

# (command, its wrong arguments, the flags in the message that replace them,
# their value). The value '' is that in the message; another one is used where
# the message leaves it to the user. Without dashes, flags are keys of the
# config, as messages about several keys name them.
ROWS = [
  (('train',), (), '--config', QUICK[1].partition('=')[2]),
  (('train',), ('configs/quickstart.py',), '--config', 'configs/quickstart.py'),
  (('train',), ('--confg=x',), '--config', 'configs/quickstart.py'),
  (QUICK, ('--batch_size=64',), '--config.batch_size', '64'),
  (QUICK, ('--config.optimizer.lr=1',), '--config.schedule.base_lr', '1'),
  (QUICK, ('--epochs=5',), '--config.total', '20 epochs'),
  (QUICK, ('--wrokdir=x',), '--workdir', 'x'),
  (
    QUICK,
    ('--config.train.num_examples=9',),
    '--config.train.num_examples',
    '',
  ),
  (QUICK, ('--config.num_classes=5',), '--config.num_classes', ''),
  (QUICK, ('--config.batch_size=30',), '--config.batch_size', '8'),
  ((*QUICK, '--config.micro_batches=7'), (), '--config.batch_size', '56'),
  ((*QUICK, '--config.image_size=17'), (), 'model.remainder', ''),
  (QUICK, ('--profile=5',), '--profile', '10:15'),
  (
    (*QUICK, HEADLESS, '--config.objective.name=dino'),
    ('--config.augment.name=transforms', '--config.evals.test=None'),
    'augment.name',
    'multicrop',
  ),
  (
    QUICK,
    ('--config.schedule.warmup=200 epochs',),
    'schedule.warmup',
    '0 steps',
  ),
  (QUICK, ('--num_processes=2',), '--num_processes', '1'),
  ((*QUICK, '--config.evals=None'), (), 'checkpoint.best', 'None'),
  (MAE, (), '--config.num_classes', ''),
  (
    (*MAE, HEADLESS, '--config.model.remainder=drop'),
    ('--config.image_size=17',),
    '--config.image_size',
    '',
  ),
  (
    (*MAE, HEADLESS),
    ('--config.model.name=resnet', '--config.model.variant=R50x1'),
    'config.model.name',
    '',
  ),
  (
    (*QUICK, '--config.model.fc_norm=true'),
    ('--config.model.pool=token_gap',),
    'model.pool',
    '',
  ),
  (
    (*QUICK, '--config.model.distilled=true'),
    (),
    'model.pool pre_logits fc_norm',
    '',
  ),
  ((*QUICK, '--config.model.rope_jitter=1.5'), (), 'model.rope', ''),
  (
    (
      *QUICK,
      '--config.model.rope=mixed',
      '--config.model.rope_registers=2',
      '--config.model.registers=4',
    ),
    (),
    'model.rope',
    '',
  ),
  (
    (*QUICK, '--config.model.rope=index', '--config.model.rope_registers=2'),
    (),
    'model.registers',
    '',
  ),
  (
    (*QUICK, '--config.model.prefix_positions=false'),
    ('--config.model.position=sincos2d',),
    'model.position',
    '',
  ),
  (
    (
      *QUICK,
      *(f'--config.{s}.channels=4' for s in ('model', 'augment', 'preprocess')),
    ),
    ('--config.mix.erasing=0.2',),
    'mix.erasing',
    '',
  ),
  (
    (
      *QUICK,
      '--config.evals.knn.name=neighbours',
      '--config.evals.knn.split=test',
    ),
    ('--config.evals.knn.ks=2000,',),
    '--config.evals.NAME.ks',
    '',
  ),
  (
    (
      *QUICK,
      '--config.evals.few.name=fewshot',
      '--config.evals.few.shots=1,',
    ),
    ('--config.evals.few.split=train',),
    '--config.evals.NAME.train_split --config.evals.NAME.split',
    '',
  ),
  (DINO, ('--config.batch_size=8',), '--config.augment.group', ''),
  (
    (*SMALL_DINO, '--config.augment.group=None'),
    ('--config.augment.patch_size=7',),
    '--config.augment.patch_size',
    '',
  ),
  (
    ('train', '--config=configs/folder.py:path=empty_class'),
    (),
    '--config.source.allow_empty',
    'true',
  ),
  (TUNE, ('--config.init_from=',), '--config.init_from', 'tiny.npz'),
  (
    (*TUNE, '--config.init_from=tiny.npz'),
    ('--config.model.name=swin',),
    '--config.model.name',
    '',
  ),
  (('convert', 'tiny.npz', 'there.npz'), (), '--overwrite', 'true'),
  (('evaluate', TINY), (), '--dataset', 'digits'),
  (('evaluate', TINY, '--dataset=digits'), (), '--split', ''),
  (
    ('evaluate', TINY, *DIGITS),
    ('--config.image_size=32',),
    '--image_size',
    '32',
  ),
  (('evaluate', TINY, *DIGITS), ('--image_size=x',), '--image_size', ''),
  (
    ('evaluate', TINY, *DIGITS),
    ('--evaluator=classifcation',),
    '--evaluator',
    'classification',
  ),
  (('features', TINY, '--out=f'), (), '--split', 'test[:16]'),
  (
    ('features', TINY, *DIGITS, '--out=layers'),
    ('--layers=9',),
    '--layers',
    '0',
  ),
  (('preview', QUICK[1]), ('--out=grid',), '--out', 'grid.png'),
  (('analyze', TINY), (), '--out', 'figures'),
  (PLAN, (), '--topology', 'local'),
  (PLAN, ('--topology=v3-32',), '--topology', 'v3:4x4'),
  (LAUNCH, (), '--target', 'tpu'),
  ((*LAUNCH, '--target=slurm'), (), '--topology', 'h100:4x8'),
]


class Accepted(Exception):
  """The command has checked its flags, config and data."""


def _accept(*arguments, **options):
  raise Accepted


@pytest.fixture(scope='module')
def place(tmp_path_factory):
  """Creates the working directory of the rows."""
  root = tmp_path_factory.mktemp('place')
  (root / 'configs').symlink_to(cli.ROOT / 'configs')
  rng = np.random.default_rng(0)
  for split in ('train', 'val'):
    for label in ('cat', 'dog'):
      folder = root / 'good' / split / label
      folder.mkdir(parents=True)
      for i in range(8):
        pixels = rng.integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f'{i}.png')
  shutil.copytree(root / 'good', root / 'empty_class')
  (root / 'empty_class' / 'train' / 'emu').mkdir()
  for name in ('tiny.npz', 'there.npz'):
    save_classifier(str(root / name))
  return root


@pytest.fixture
def run(place, monkeypatch):
  """Returns a function: (command, arguments…) → message, '' if accepted."""
  monkeypatch.chdir(place)
  monkeypatch.setenv('TFDS_DATA_DIR', str(place / 'tfds'))
  monkeypatch.setattr(Session, 'compiled_step', property(_accept))
  monkeypatch.setattr(compile, 'plan', _accept)

  def typed(*command):
    with contextlib.suppress(Accepted):
      return message_of(monkeypatch, *command)
    return ''

  return typed


def followed(message: str, names: str, value: str) -> list[str]:
  """Returns the flags that follow the advice of a message.

  Args:
    message: message that names all of the flags.
    names: flags or keys of the config, separated by spaces.
    value: value of the flags; '' for that in the message.
  """
  evaluator = re.search(r'config\.evals\.(\w+):', message)
  first, result = names.split()[0], []
  for name in names.split():
    named = re.findall(
      rf'(?<![\w.-]){re.escape(name)}(?!\.?\w)(=\S+)?', message
    )
    assert named, f'{name} is not in: {message}'
    given = value or max(named).strip("=.,;:)'")
    assert given, f'no value of {name} in: {message}'
    if '.' not in name and '.' in first:  # in the section of the first key
      name = f'{first.rpartition(".")[0]}.{name}'
    if not name.startswith('--'):
      name = f'--config.{name.removeprefix("config.")}'
    name = name.replace('.NAME.', f'.{evaluator[1] if evaluator else "new"}.')
    result.append(f'{name}={given}')
  return result


@pytest.mark.parametrize(
  ('command', 'wrong', 'names', 'value'),
  [
    pytest.param(
      *row,
      id=' '.join(row[0][:1] + row[1])[:30] + f' {row[2]}',
      # Further rows have the same kinds of messages: CI tests a third of them.
      marks=pytest.mark.long if number > 12 and number % 3 else (),
    )
    for number, row in enumerate(ROWS)
  ],
)
def test_the_advice_of_messages_works(run, command, wrong, names, value):
  """Nothing more is said about the advised flags, which replace the wrong ones.

  The command may lack another flag.
  """
  message = run(*command, *wrong)
  advice = followed(message, names, value)
  after = run(*command, *advice)
  repeated = [
    flag
    for flag in (text.removeprefix('--').partition('=')[0] for text in advice)
    if re.search(rf'\b{flag.removeprefix("config.")}\b', after)
  ]
  assert message and after != message and not repeated, f'{message}\n{after}'


def exists(key: str) -> bool:
  """Returns whether some config has a key, such as 'evals.NAME.split'."""
  first, *rest = key.split('.')
  mark = schema.MARKS.get(first)
  if mark is None:
    return first in schema.config_keys(top_level) and not rest
  if mark.many:
    rest = rest[1:]
  if not rest or rest == ['name']:
    return True
  kinds = schema.names(mark.pattern) if '{name}' in mark.pattern else ['']
  return any(rest[0] in mark.keys(kind) for kind in kinds)


def test_flags_and_keys_in_messages_exist():
  """Messages of a flag that was removed or renamed would mislead."""
  pattern = re.compile(r'(?<![\w./-])(?:--)?(config\.[\w.]+|(?<=--)[a-z]\w+)')
  named = set()
  for path in (cli.ROOT / 'vit_jax').rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Raise):
        for text in ast.walk(node):
          if isinstance(text, ast.Constant) and isinstance(text.value, str):
            found = pattern.findall(text.value)
            named |= {(path.name, name.rstrip('.')) for name in found}
  wrong = {
    (file, name)
    for file, name in named
    if not (
      exists(name.removeprefix('config.'))
      if name.startswith('config.')
      else {name, name.removeprefix('no')} & {*MAIN_FLAGS, 'config'}
    )
  }
  files = {'config.json'}
  assert {each for each in wrong if each[1] not in files} == {
    ('__init__.py', 'install'),  # of WSL
  }
  assert len(named) > 50
