"""Tests that the advice of messages works, and that what it names exists."""

import ast
import contextlib
import re

import pytest
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
TUNE = ('finetune', '--config=configs/finetune_quickstart.py')
TUNE_TINY = (*TUNE, '--config.init_from=tiny.npz')
PLAN = ('plan.main', '--config=configs/quickstart.py')
LAUNCH = ('launch.__main__', QUICK[1], '--dry_run', '--noplan')
TINY = '--checkpoint=tiny.npz'
EVALUATE = ('evaluate', TINY, '--dataset=digits', '--split=test[:16]')
NUM_EXAMPLES = '--config.train.num_examples'

# (command, its wrong arguments, the flag in the message that replaces them, its
# value). The value '' is that in the message; another one is used where the
# message leaves it to the user. Without dashes, it is a key of the config.
ROWS = [
  (('train',), (), '--config', QUICK[1].partition('=')[2]),
  (('train',), ('configs/quickstart.py',), '--config', 'configs/quickstart.py'),
  (('train',), ('--confg=x',), '--config', 'configs/quickstart.py'),
  (QUICK, ('--batch_size=64',), '--config.batch_size', '64'),
  (QUICK, ('--config.optimizer.lr=1',), '--config.schedule.base_lr', '1'),
  (QUICK, ('--epochs=5',), '--config.total', '20 epochs'),
  (QUICK, ('--wrokdir=x',), '--workdir', 'x'),
  (QUICK, (f'{NUM_EXAMPLES}=9',), NUM_EXAMPLES, ''),
  (QUICK, ('--config.num_classes=5',), '--config.num_classes', ''),
  (QUICK, ('--config.batch_size=30',), '--config.batch_size', '8'),
  ((*QUICK, '--config.micro_batches=7'), (), '--config.batch_size', '56'),
  ((*QUICK, '--config.image_size=17'), (), 'model.remainder', ''),
  (QUICK, ('--profile=5',), '--profile', '10:15'),
  (QUICK, ('--num_processes=2',), '--num_processes', '1'),
  (TUNE_TINY, ('--config.model.name=swin',), '--config.model.name', ''),
  (('convert', 'tiny.npz', 'there.npz'), (), '--overwrite', 'true'),
  (('evaluate', TINY), (), '--dataset', 'digits'),
  (('evaluate', TINY, '--dataset=digits'), (), '--split', ''),
  (EVALUATE, ('--evaluator=classifcation',), '--evaluator', 'classification'),
  (('preview', QUICK[1]), ('--out=grid',), '--out', 'grid.png'),
  (('analyze', TINY), (), '--out', 'figures'),
  (PLAN, ('--topology=v3-32',), '--topology', 'v3:4x4'),
  (LAUNCH, (), '--target', 'tpu'),
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


def followed(message: str, name: str, value: str) -> str:
  """Returns the flag that follows the advice of a message.

  Args:
    message: message that names the flag.
    name: flag or key of the config.
    value: value of the flag; '' for that in the message.
  """
  pattern = rf'(?<![\w.-]){re.escape(name)}(?!\.?\w)(=\S+)?'
  named = re.findall(pattern, message)
  assert named, f'{name} is not in: {message}'
  given = value or max(named).strip("=.,;:)'")
  assert given, f'no value of {name} in: {message}'
  return f'{name if name.startswith("--") else f"--config.{name}"}={given}'


@pytest.mark.parametrize(
  ('command', 'wrong', 'name', 'value'),
  [
    pytest.param(
      *row,
      id=' '.join(row[0][:1] + row[1])[:30] + f' {row[2]}',
      # Rows have the same kinds of messages: CI tests a third of them.
      marks=pytest.mark.long if number % 3 else (),
    )
    for number, row in enumerate(ROWS)
  ],
)
def test_the_advice_of_messages_works(run, command, wrong, name, value):
  """Nothing more is said about the advised flag, which replaces the wrong ones.

  The command may lack another flag.
  """
  message = run(*command, *wrong)
  advice = followed(message, name, value)
  after = run(*command, advice)
  flag = advice.removeprefix('--').partition('=')[0].removeprefix('config.')
  is_repeated = re.search(rf'\b{flag}\b', after)
  assert message and after != message and not is_repeated, f'{message}\n{after}'


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
    ('__init__.py', 'install')  # of WSL
  }
  assert len(named) > 50
