"""Tests of every kind of damage to the newest checkpoint."""

import contextlib
import gc
import pathlib
import shutil

import jax
import pytest

from tests.checkpoint.states import experiment, restore, same, save, state, wide
from tests.faults.counts import further, injected
from vit_jax.arrays import checksum, sharding, tree
from vit_jax.checkpoint import Checkpointer
from vit_jax.errors import UserError
from vit_jax.weights import pretrained

# Orbax does not await some coroutines when a restore fails. Python warns when
# it collects them, which the fixture below triggers within the same test.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)


@pytest.fixture(autouse=True)
def _collect_coroutines():
  yield
  gc.collect()


@pytest.fixture
def saved(tmp_path):
  """Returns a directory with the steps 1 and 2."""
  save(tmp_path / 'checkpoints', 1, 2)
  return tmp_path / 'checkpoints'


def _names(folder: pathlib.Path) -> list[str]:
  """Returns the names of steps and other entries, without the run's id."""
  return sorted({p.name for p in folder.iterdir()} - {'run_id.json'})


def _largest_file(folder: pathlib.Path) -> pathlib.Path:
  files = [p for p in folder.rglob('*') if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def _flip_a_byte(step: pathlib.Path) -> None:
  file = _largest_file(step / 'params')
  data = bytearray(file.read_bytes())
  data[len(data) // 2] ^= 1
  file.write_bytes(data)


def _truncate(step: pathlib.Path) -> None:
  file = _largest_file(step / 'training')
  file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _rename_a_class(step: pathlib.Path) -> None:
  file = step / 'about/metadata'
  file.write_text(file.read_text().replace('cat', 'bat', 1))


def _other_shapes(step: pathlib.Path) -> None:
  """Puts arrays of a wider model under this step's manifest."""
  other = step.parent.parent / 'other'
  with contextlib.closing(Checkpointer(other, {})) as checkpoints:
    checkpoints.save(2, state(2, wide()), {})
  shutil.rmtree(step / 'params')
  shutil.copytree(other / '2/params', step / 'params')


DAMAGES = {
  'one flipped byte': _flip_a_byte,
  'missing item': lambda step: shutil.rmtree(step / 'training'),
  'missing manifest': lambda step: shutil.rmtree(step / 'manifest'),
  'truncated file': _truncate,
  'another class name': _rename_a_class,
  'missing leaf file': lambda step: _largest_file(step / 'params').unlink(),
  'wrong shapes': _other_shapes,
}


@pytest.mark.slow
def test_an_emptied_step_is_left_alone_and_logged(saved, caplog):
  """It cannot be distinguished from a directory of the user."""
  shutil.rmtree(saved / '2')
  (saved / '2').mkdir()
  injected('checkpoint: nothing left of a step')
  assert restore(saved)[1] == 1
  assert 'checkpoints/2 is not a checkpoint' in caplog.text
  assert _names(saved) == ['1', '2']


@pytest.mark.slow
@pytest.mark.parametrize('damage', [*DAMAGES][:5] + further(*[*DAMAGES][5:]))
def test_a_damaged_step_is_renamed_and_the_older_one_used(saved, damage):
  """The older state is exact."""
  DAMAGES[damage](saved / '2')
  injected(f'checkpoint: {damage}')
  if damage == 'another class name':  # commands change nothing
    with pytest.raises(UserError, match='is damaged: the checksum'):
      pretrained.find(str(saved))
  restored, step = restore(saved)
  assert step == 1 and same(restored, state(1))
  assert {'1', '2.bad'} <= set(_names(saved)) and not (saved / '2').exists()


@pytest.mark.slow
def test_without_an_intact_step_a_run_is_refused(saved):
  """It does not start from scratch, at the second attempt either."""
  for step in (1, 2):
    _flip_a_byte(saved / str(step))
  injected('checkpoint: all steps bad')
  for _ in range(2):
    with pytest.raises(UserError, match='1.bad, 2.bad'):
      restore(saved)
  assert _names(saved) == ['1.bad', '2.bad']


def test_an_empty_directory_is_a_new_run(tmp_path):
  assert restore(tmp_path / 'checkpoints') is None


@pytest.mark.slow
def test_a_config_of_another_model_is_a_user_error(saved):
  """Five differences are listed, and nothing is renamed."""
  words = (
    r'(?s)the parameters of the model:(\n  [^\n]*){5}\n  and \d+ more\nSet'
  )
  with pytest.raises(UserError, match=words):
    restore(saved, wide())
  assert _names(saved) == ['1', '2']


@pytest.mark.slow
@pytest.mark.parametrize('devices, fsdp', [(8, 4), *further([4, 1])])
def test_a_step_is_restored_on_any_mesh(saved, devices, fsdp):
  other = experiment(devices, fsdp)
  restored, step = restore(saved, other)
  assert step == 2 and same(restored, state(2))
  expected = tree.flatten(other.abstract_state)
  for path, leaf in tree.flatten(restored).items():
    assert leaf.sharding == expected[path].sharding, path


@pytest.mark.slow
def test_checksums_do_not_depend_on_the_mesh():
  """One changed element changes the checksum of its leaf."""
  one, sharded = (
    checksum.checksums(state(3, experiment(devices, fsdp)))
    for devices, fsdp in ((1, 1), (8, 4))
  )
  assert one == sharded
  everywhere = sharding.replicated(experiment().mesh)

  def of(array):
    return checksum.checksums({'k': jax.device_put(array, everywhere)})

  ramp = jax.numpy.arange(6.0).reshape(2, 3)
  assert of(ramp) == of(ramp + 0)
  for other in (
    ramp.at[1, 2].add(1e-6),  # one bit
    ramp[:, ::-1],  # the same values elsewhere
    -ramp,
  ):
    assert of(ramp) != of(other)
