"""Draws figures of a run while it trains.

The figures are those of `python -m vit_jax.analyze`, written to WORKDIR/figures
and shown in the HTML report. There are no metrics.

Only the main process does this work, with all weights. A failure is logged and
does not end the run.
"""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from vit_jax.analysis import gallery
from vit_jax.analysis.figures import examine
from vit_jax.arrays import sharding
from vit_jax.arrays.tree import PyTree
from vit_jax.config import durations, schema
from vit_jax.errors import check_range
from vit_jax.evaluators import contract
from vit_jax.evaluators.features import OnSplit, Spread
from vit_jax.processes.consensus import from_main
from vit_jax.processes.preemption import StopRequested

log = logging.getLogger('vit_jax')


@contextlib.contextmanager
def failures_logged(consequence: str) -> Iterator[None]:
  """Logs an error in a `with` block or a decorated function, and continues.

  Args:
    consequence: description of what is missing after an error, for the log.
  """
  try:
    yield
  except StopRequested:
    log.info('%s: a signal arrived', consequence)
  except Exception as error:  # noqa: BLE001 (pictures must not end a run)
    log.warning('%s: %s: %s', consequence, type(error).__name__, error)


def gather_to_main(
  setting: contract.Setting, weights: PyTree
) -> tuple[contract.Setting, PyTree]:
  """Returns a setting and weights that the main process can use by itself.

  All processes must call it, because each may have only a part of the weights.
  With several processes, each gets all weights on each of its own devices. The
  main process can then compute without communicating: if it fails, the others
  are only waiting for its result (`processes.consensus.from_main`).

  Args:
    setting: setting of the run's evaluators.
    weights: weights, in any sharding.

  Returns:
    A setting whose mesh holds only local devices, and the weights replicated
    on that mesh. With one process, both arguments unchanged.
  """
  if jax.process_count() == 1:
    return setting, weights
  mesh = sharding.make_mesh(jax.local_devices())
  gathered = multihost_utils.process_allgather(weights, tiled=True)
  local = setting._replace(
    mesh=mesh,
    # A multiple of the number of local devices.
    batch_size=-(-setting.batch_size // mesh.size) * mesh.size,
    # The check for signals is a collective, which one process cannot call.
    check=lambda: None,
  )
  return local, jax.device_put(gathered, sharding.replicated(mesh))


@schema.operational('split', 'weights', 'num_images', 'every')
@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(OnSplit):
  """Draws the figures of one set of weights; see `analysis.figures`.

  Attributes:
    split: split of the run's source from which the images are taken.
    weights: weights that are examined: 'params' for the parameters themselves,
      'ema' for their average, or another name that the objective defines
      ('teacher').
    num_images: number of images over which the attention distance is averaged;
      the paper's Figure 11 uses 128.
    every: duration between two drawings; '0 steps' draws only at the end.

  Raises:
    UserError: the split does not exist, or a value is out of range.
  """

  measures = False

  weights: str = 'params'
  num_images: int = 32
  every: str = '0 steps'

  def __post_init__(self):
    durations.check('every', self.every)
    check_range('num_images', self.num_images, at_least=1)
    super().__post_init__()
    self._spread = Spread(self._source, self.num_images)

  def run_all(
    self, weights: dict[str, PyTree], step: int
  ) -> dict[str, dict[str, float]]:
    """Draws the figures of the set of weights that the config names.

    All processes must call it. A failure is logged and does not end the run.

    Args:
      weights: weights by name, see `Trainer.weights`. Nothing is drawn if the
        set that the config names is missing.
      step: number of updates completed.
    """
    title = f'step {step:,}'
    # No other set is drawn instead, because it would overwrite the figures of
    # the set that the config names.
    if self.weights not in weights:
      return {}
    if self.weights != 'params':
      title = f'{title}, {self.weights}'
    setting, params = gather_to_main(self.setting, weights[self.weights])
    from_main(functools.partial(self._draw, setting, params, title))
    return {}

  @failures_logged('no figures')
  def _draw(
    self, setting: contract.Setting, params: PyTree, title: str
  ) -> None:
    """Draws the figures of weights into the workdir."""
    with jax.set_mesh(setting.mesh):
      images, masks = self._spread.images(setting.transform)
      found = examine(setting.objective, params, images, masks=masks)
    about = {
      'weights': title,
      'images': f'{len(images)} of {self._source.name}',
    }
    assert setting.workdir is not None, 'figures are drawn in training'
    folder = setting.workdir / gallery.FOLDER
    gallery.save(folder, found, about)
