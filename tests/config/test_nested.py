"""Tests of sections within sections."""

import pytest
from minimal_config import completed

from vit_jax.config import completion, predicted
from vit_jax.config.identity import identity
from vit_jax.config.schema import build_section
from vit_jax.errors import UserError

LAB = 'tests.plugins.lab_nested'
HEADS = {'a': {'name': LAB, 'outputs': 3}, 'b': {'name': LAB, 'outputs': 5}}


def config(**changes):
  section = {'name': LAB, 'heads': HEADS} | changes
  return completed(model=section)


@pytest.fixture
def overridden(tmp_path, command_line):
  """Returns a function: (config, flags) → the config that a command gets."""

  def parse(base, *arguments):
    file = tmp_path / 'config.json'
    file.write_text(completion.to_json(base))
    return command_line(f'--config={file}', *arguments)

  return parse


def test_nested_sections_are_completed():
  """Each `name` selects the constructor with the defaults."""
  model = config(stem={'name': LAB, 'bias': False}).model.to_dict()
  assert model['stem'] == {'name': LAB, 'kernel_size': 3, 'bias': False}
  head = {'name': LAB, 'outputs': 3, 'shown': False, 'weight': 1.0}
  assert model['heads'] == {'a': head, 'b': head | {'outputs': 5}}
  assert config().model.stem is None


def test_build_section_builds_nested_sections():
  built = build_section(
    config(stem={'name': LAB, 'kernel_size': 7}), 'model', 4
  )
  assert (built.stem.width, built.stem.kernel_size) == (8, 7)
  assert [head.outputs for head in built.heads.values()] == [3, 5]
  assert built.weights == {'a': 1.0, 'b': 1.0}
  assert build_section(config(), 'model', 4).stem is None


def test_a_default_in_a_nested_section_keeps_predicted_costs():
  """A new key with a default does not change the hash; another value does."""

  def fingerprint(**stem):
    return predicted.fingerprint(config(stem={'name': LAB} | stem))

  older = config(stem={'name': LAB})
  with older.unlocked():
    del older.model.stem['bias']
  assert predicted.fingerprint(older) == fingerprint()
  hashes = {fingerprint(), fingerprint(bias=False), fingerprint(kernel_size=5)}
  assert len({*hashes, predicted.fingerprint(config())}) == 4


def test_messages_contain_the_whole_path():
  """The message of an error contains the path of the key."""
  for changes, words in (
    (dict(stem={'name': LAB, 'bias': 1}), 'model.stem.bias is 1.* bool'),
    (dict(stem={'name': 'lab_nestd'}), "'lab_nestd'.* Stem"),
    (dict(heads={'c': {'name': LAB}}), 'model.heads.c.outputs is missing'),
    (dict(heads={'c': 3}), 'model.heads.c is 3'),
    (dict(heads=[1]), r'model.heads is \[1\]'),
  ):
    with pytest.raises(UserError, match=words):
      config(**changes)


def test_flags_override_nested_keys(overridden):
  """This includes keys of one of several sections of the same kind."""
  base = config(stem={'name': LAB})
  args = [
    '--config.model.stem.kernel_size=5',
    '--config.model.heads.b.weight=2',
  ]
  found = overridden(base, *args).model
  assert (found.stem.kernel_size, found.heads.b.weight) == (5, 2.0)
  assert found.heads.a.weight == 1.0


def test_a_name_flag_creates_a_section(overridden):
  """The order of the flags does not matter."""
  args = [
    '--config.model.stem.kernel_size=5',
    f'--config.model.stem.name={LAB}',
  ]
  found = overridden(config(), *args)
  assert found.model.stem.to_dict() == {
    'name': LAB,
    'kernel_size': 5,
    'bias': True,
  }


HYBRID = dict(name='vit', variant='R50+B/16')
STEM = '--config.model.stem.name=resnet'


def test_flags_set_keys_without_defaults(overridden):
  """Numbers and tuples can be given together with the name of a new section."""
  for depths in ('(2,1)', '2, 1', '[2,1]'):
    args = [f'--config.model.stem.depths={depths}', STEM]
    found = overridden(completed(model=HYBRID), *args).model
    assert found.variant == 'R50+B/16'
    assert found.stem.to_dict() == {
      'name': 'resnet',
      'depths': (2, 1),
      'width_factor': 1,
    }


@pytest.mark.parametrize(
  'args, words',
  [
    ([STEM], 'model.stem.depths is missing'),
    ([STEM, '--config.model.stem.depths=many'], 'stem.depths is .many.; '),
    (['--config.model.stem.depths=1'], 'model.stem.name is missing'),
  ],
)
def test_a_missing_key_without_default_is_one_message(overridden, args, words):
  """The message does not list all keys of the config."""
  with pytest.raises(UserError, match=words):
    overridden(completed(model=HYBRID), *args)


@pytest.mark.parametrize(
  'arg, words',
  [
    ('--config.model.stem=conv', 'is a section.*config.model.stem.name='),
    ('--config.model.stem.bia=1', "model.stem.bia .*mean 'bias'"),
    ('--config.model.heads.c.weight=1', 'model.heads.c.weight is not a key'),
    ('--config.model.heads=5', 'is a section'),
  ],
)
def test_messages_of_wrong_nested_flags(overridden, arg, words):
  """A section that a flag replaces by a value is refused."""
  base = config() if arg.endswith('conv') else config(stem={'name': LAB})
  with pytest.raises(UserError, match=words):
    overridden(base, arg)


def test_identity_leaves_out_nested_operational_keys():
  """Each nested constructor marks its own operational keys."""
  keys = {k for k in identity(config()) if k.startswith('model.heads.a.')}
  assert keys == {f'model.heads.a.{k}' for k in ('name', 'outputs', 'weight')}
