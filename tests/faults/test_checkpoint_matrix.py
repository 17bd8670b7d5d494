"""Tests of every kind of damage to the newest checkpoint."""

import contextlib
import gc
import json
import pathlib
import shutil

import jax
import pytest

from tests.checkpoint.states import experiment, restore, same, save, state, wide
from tests.faults.counts import further, injected
from vit_jax.arrays import checksum, sharding, tree
from vit_jax.checkpoint import Checkpointer
from vit_jax.errors import UserError

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


def _empty(step: pathlib.Path) -> None:
  shutil.rmtree(step)
  step.mkdir()


def _replace_by_file(step: pathlib.Path) -> None:
  shutil.rmtree(step)
  step.write_text('not a directory')


def _lie_about_a_sum(step: pathlib.Path) -> None:
  file = step / 'manifest/metadata'
  manifest = json.loads(file.read_text())
  manifest['leaves']['params/head/bias'][2] ^= 1
  file.write_text(json.dumps(manifest))


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
  'missing leaf file': lambda step: _largest_file(step / 'params').unlink(),
  'unreadable manifest': lambda step: (step / 'manifest/metadata').write_text(
    '{'
  ),
  'wrong checksum': _lie_about_a_sum,
  'wrong shapes': _other_shapes,
}


@pytest.mark.slow
@pytest.mark.parametrize('replace', [_empty, *further(_replace_by_file)])
def test_an_emptied_step_is_left_alone_and_logged(saved, replace, caplog):
  """It cannot be distinguished from a directory of the user."""
  replace(saved / '2')
  injected('checkpoint: nothing left of a step')
  with caplog.at_level('WARNING', logger='vit_jax'):
    assert restore(saved)[1] == 1
  assert 'checkpoints/2 is not a checkpoint' in caplog.text
  assert _names(saved) == ['1', '2']


@pytest.mark.slow
@pytest.mark.parametrize('damage', [*DAMAGES][:4] + further(*[*DAMAGES][4:]))
def test_a_damaged_step_is_renamed_and_the_older_one_used(
  saved, damage, caplog
):
  """The log contains the cause; the older state is exact."""
  DAMAGES[damage](saved / '2')
  injected(f'checkpoint: {damage}')
  with caplog.at_level('ERROR', logger='vit_jax'):
    restored, step = restore(saved)
  assert step == 1
  assert same(restored, state(1))
  assert (saved / '2.bad').exists() and not (saved / '2').exists()
  assert (saved / '1').is_dir()


@pytest.mark.slow
def test_without_an_intact_step_a_run_is_refused(saved):
  """It does not start from scratch, at the second attempt either."""
  for step in (1, 2):
    _flip_a_byte(saved / str(step))
  injected('checkpoint: all steps bad')
  for _ in range(2):
    with pytest.raises(UserError, match='1.bad, 2.bad'):
      restore(saved)
  assert (saved / '1.bad').is_dir() and (saved / '2.bad').is_dir()


def test_an_empty_directory_is_a_new_run(tmp_path):
  assert restore(tmp_path / 'checkpoints') is None


@pytest.mark.slow
def test_a_config_of_another_model_is_a_user_error(saved):
  """Nothing is renamed."""
  words = (
    r'(?s)the parameters of the model:(\n  [^\n]*){5}\n  and \d+ more\nSet'
  )
  with pytest.raises(UserError, match=words):
    restore(saved, wide())
  assert _names(saved) == ['1', '2']


@pytest.mark.slow
@pytest.mark.parametrize('devices, fsdp', [(8, 4), *further([4, 1], [2, 2])])
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
  sums = []
  for devices, fsdp in ((1, 1), (8, 4)):
    other = experiment(devices, fsdp)
    sums.append(checksum.checksums(state(3, other)))
  assert sums[0] == sums[1]
  everywhere = sharding.replicated(experiment().mesh)

  def of(array):
    return checksum.checksums({'k': jax.device_put(array, everywhere)})

  ramp = jax.numpy.arange(6.0).reshape(2, 3)
  assert of(ramp) != of(ramp.at[1, 2].add(1e-6))  # one bit
  assert of(ramp) != of(ramp[:, ::-1])  # the same values elsewhere
  assert of(ramp) != of(-ramp)
  assert of(ramp) == of(ramp + 0)


@pytest.mark.slow
@pytest.mark.parametrize('late', [True, *further(False)])
def test_the_best_step_is_kept_after_a_restart(tmp_path, late):
  """A metric may be written when an interrupted evaluation is repeated."""
  for step, accuracy in enumerate((0.1, 0.9, 0.3, 0.2, 0.4), start=1):
    for metrics in [{}] * late + [{'val/accuracy': accuracy}]:
      with contextlib.closing(
        Checkpointer(tmp_path / 'c', {}, keep=2, best='val/accuracy')
      ) as checkpoints:
        checkpoints.save(step, state(step), metrics)
  assert _names(tmp_path / 'c') == ['2', '4', '5']


def test_a_failed_write_of_late_metrics_is_counted(tmp_path):
  """The step stays intact."""
  with contextlib.closing(
    Checkpointer(tmp_path / 'c', {}, best='val/accuracy')
  ) as checkpoints:
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    (tmp_path / 'c/1/metrics').write_text('in the way')
    assert checkpoints.save(1, state(1), {'val/accuracy': 0.5})
    assert checkpoints.failures == 1 and checkpoints.latest_step() == 1
