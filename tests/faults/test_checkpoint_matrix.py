"""Every kind of damage to the newest checkpoint: the next older one is used."""

import contextlib
import gc
import json
import pathlib
import shutil

import jax
import pytest

from tests.checkpoint.states import experiment, restore, same, save, state, wide
from tests.faults.counts import injected
from vit_jax.arrays import checksum, sharding, tree
from vit_jax.checkpoint import Checkpointer
from vit_jax.errors import UserError

# Orbax leaves coroutines unawaited when a restore fails; Python complains when
# it collects them, which the fixture below makes happen in the same test.
pytestmark = pytest.mark.filterwarnings(
  'ignore::pytest.PytestUnraisableExceptionWarning'
)


@pytest.fixture(autouse=True)
def _collect_coroutines():
  yield
  gc.collect()


@pytest.fixture
def saved(tmp_path):
  """A directory with the steps 1 and 2."""
  save(tmp_path / 'checkpoints', 1, 2)
  return tmp_path / 'checkpoints'


def _names(folder: pathlib.Path) -> list[str]:
  """The steps, and what else there is but the run's id."""
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
  """Arrays of a wider model under this step's manifest."""
  other = step.parent.parent / 'other'
  with contextlib.closing(Checkpointer(other, {})) as checkpoints:
    checkpoints.save(2, state(2, wide()), {})
  shutil.rmtree(step / 'params')
  shutil.copytree(other / '2/params', step / 'params')


DAMAGES = {
  'one flipped byte': _flip_a_byte,
  'truncated file': _truncate,
  'missing leaf file': lambda step: _largest_file(step / 'params').unlink(),
  'missing item': lambda step: shutil.rmtree(step / 'training'),
  'missing manifest': lambda step: shutil.rmtree(step / 'manifest'),
  'unreadable manifest': lambda step: (step / 'manifest/metadata').write_text(
    '{'
  ),
  'wrong checksum': _lie_about_a_sum,
  'wrong shapes': _other_shapes,
}


@pytest.mark.parametrize('replace', [_empty, _replace_by_file])
def test_nothing_is_left_of_the_newest_step(saved, replace, caplog):
  """What cannot be told from a user's own entry is left alone, and said."""
  replace(saved / '2')
  injected('checkpoint: nothing left of a step')
  with caplog.at_level('WARNING', logger='vit_jax'):
    assert restore(saved)[1] == 1
  assert 'checkpoints/2 is not a checkpoint' in caplog.text
  assert _names(saved) == ['1', '2']


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_newest_step(saved, damage, caplog):
  """It is set aside with its cause in the log; the older one is exact."""
  DAMAGES[damage](saved / '2')
  injected(f'checkpoint: {damage}')
  with caplog.at_level('ERROR', logger='vit_jax'):
    restored, step = restore(saved)
  assert step == 1
  assert same(restored, state(1))
  assert (saved / '2.bad').exists() and not (saved / '2').exists()
  assert (saved / '1').is_dir()


def test_whole_newest_step(saved):
  """Nothing is set aside without need."""
  restored, step = restore(saved)
  assert step == 2 and same(restored, state(2))
  assert _names(saved) == ['1', '2']


def test_leftover_temporary_directory(saved):
  """What a killed save leaves behind is no checkpoint."""
  shutil.copytree(saved / '2', saved / '3.orbax-checkpoint-tmp')
  injected('checkpoint: leftover temporary directory')
  assert restore(saved)[1] == 2


def test_all_damaged_is_a_clear_stop(saved):
  """Never a fresh start over somebody's run; not at the second try either."""
  for step in (1, 2):
    _flip_a_byte(saved / str(step))
  injected('checkpoint: all steps bad')
  for _ in range(2):
    with pytest.raises(UserError, match='no checkpoint in .* is whole'):
      restore(saved)
  assert (saved / '1.bad').is_dir() and (saved / '2.bad').is_dir()


def test_nothing_committed_is_a_fresh_start(tmp_path):
  """Only an empty directory means a new run."""
  assert restore(tmp_path / 'checkpoints') is None


def test_another_model_is_the_users_error(saved):
  """A config that does not fit sets nothing aside."""
  with pytest.raises(UserError, match='other parameters than the model'):
    restore(saved, wide())
  assert _names(saved) == ['1', '2']


@pytest.mark.parametrize('devices, fsdp', [(4, 1), (8, 4), (2, 2)])
def test_another_mesh(saved, devices, fsdp):
  """A step written on one device is whole on any mesh."""
  other = experiment(devices, fsdp)
  restored, step = restore(saved, other)
  assert step == 2 and same(restored, state(2))
  wanted = tree.flatten(other.abstract_state())
  for path, leaf in tree.flatten(restored).items():
    assert leaf.sharding == wanted[path].sharding, path


def test_checksums_do_not_depend_on_the_mesh():
  """Equal on every layout; one changed element changes its leaf's sum."""
  sums = []
  for devices, fsdp in ((1, 1), (8, 4)):
    other = experiment(devices, fsdp)
    everywhere = sharding.replicated(other.mesh)
    sums.append(checksum.checksums(state(3, other), everywhere))
  assert sums[0] == sums[1]
  everywhere = sharding.replicated(experiment().mesh)

  def of(array):
    return checksum.checksums({'k': array}, everywhere)

  ramp = jax.numpy.arange(6.0).reshape(2, 3)
  assert of(ramp) != of(ramp.at[1, 2].add(1e-6))  # one bit
  assert of(ramp) != of(ramp[:, ::-1])  # the same values elsewhere
  assert of(ramp) != of(-ramp)
  assert of(ramp) == of(ramp + 0)


def test_retention_keeps_newest_and_best(tmp_path):
  """`keep` newest steps and the best by the named metric stay."""
  with contextlib.closing(
    Checkpointer(tmp_path / 'c', {}, keep=2, best='val/accuracy')
  ) as checkpoints:
    for step, accuracy in enumerate((0.1, 0.9, 0.3, 0.2, 0.4), start=1):
      checkpoints.save(step, state(step), {'val/accuracy': accuracy})
  assert _names(tmp_path / 'c') == ['2', '4', '5']


@pytest.mark.parametrize('late', [False, True])
def test_the_best_is_known_after_a_restart(tmp_path, late):
  """Also where a signal cut the evaluation: it is made when resumed."""
  for step, accuracy in enumerate((0.1, 0.9, 0.3, 0.2, 0.4), start=1):
    for metrics in [{}] * late + [{'val/accuracy': accuracy}]:
      with contextlib.closing(
        Checkpointer(tmp_path / 'c', {}, keep=2, best='val/accuracy')
      ) as checkpoints:
        checkpoints.save(step, state(step), metrics)
  assert _names(tmp_path / 'c') == ['2', '4', '5']


def test_late_metrics_that_cannot_be_written(tmp_path):
  """Reported and counted like any failing write; the step stays whole."""
  with contextlib.closing(
    Checkpointer(tmp_path / 'c', {}, best='val/accuracy')
  ) as checkpoints:
    checkpoints.save(1, state(1), {})
    checkpoints.wait()
    (tmp_path / 'c/1/metrics').write_text('in the way')
    assert checkpoints.save(1, state(1), {'val/accuracy': 0.5})
    assert checkpoints.failures == 1 and checkpoints.latest_step() == 1
