"""Draws the paper's figures of a model while it is trained.

They are the figures of `python -m vit_jax.analyze`, written to WORKDIR/figures
and shown in the HTML report. A section of `config.evals` with `name='figures'`
enables them; it computes no metrics.
"""

import functools
from typing import Any

import jax
from etils import epath

from vit_jax.analysis import gallery
from vit_jax.analysis.figures import Masked, examine
from vit_jax.analysis.photographs import Photographs
from vit_jax.arrays.tree import PyTree
from vit_jax.config import durations, plugins
from vit_jax.errors import check_range
from vit_jax.evaluators.contract import Setting
from vit_jax.evaluators.spread import Spread
from vit_jax.processes.consensus import from_main
from vit_jax.training.experiment import Experiment
from vit_jax.training.main_process import failures_logged, gather_to_main


@plugins.operational('split', 'weights', 'num_images', 'every')
class Figures:
  """Draws the figures of one set of weights; see `analysis.figures`."""

  higher_is_better = ()  # there are no metrics for `checkpoint.best`

  def __init__(
    self,
    experiment: Experiment,
    setting: Setting,
    workdir: epath.Path,
    /,
    *,
    split: str,
    weights: str = 'params',
    num_images: int = 32,
    every: str = '0 steps',
  ):
    """Opens the split.

    Args:
      experiment: experiment of the run.
      setting: setting of the run's evaluators.
      workdir: directory of the run.
      split: split of the run's source from which the images are taken.
      weights: weights that are examined: 'params' for the parameters
        themselves, 'ema' for their average, or another name that the objective
        defines ('teacher').
      num_images: number of images over which the attention distance is
        averaged; the paper's Figure 11 uses 128.
      every: duration between two drawings; '0 steps' draws only at the end.

    Raises:
      UserError: the split does not exist, or a value is out of range.
    """
    durations.check('every', every)
    check_range('num_images', num_images, at_least=1)
    self._experiment, self._setting = experiment, setting
    # Configs of earlier versions have '' for 'params' and '_ema' for 'ema'.
    self._workdir, self._weights = workdir, weights.lstrip('_') or 'params'
    self._source = Spread(setting.open_source(split), num_images)

  def draw(self, weights: dict[str, PyTree], title: str) -> None:
    """Draws the figures of the set of weights that the config names.

    All processes must call it. A failure is logged and does not end the run.

    Args:
      weights: weights by name, see `Trainer.weights`. Nothing is drawn if the
        set that the config names is missing.
      title: title of the figures, such as 'step 600'.
    """
    # No other set is drawn instead, because it would overwrite the figures of
    # the set that the config names.
    if self._weights not in weights:
      return
    if self._weights != 'params':
      title = f'{title}, {self._weights}'
    setting, params = gather_to_main(self._setting, weights[self._weights])
    from_main(functools.partial(self._draw, setting, params, title))

  @failures_logged('no figures')
  def _draw(self, setting: Setting, params: PyTree, title: str) -> None:
    transform: Any = setting.transform
    objective = self._experiment.objective
    with jax.set_mesh(setting.mesh):
      images, originals = self._source.images(transform)
      found = examine(
        self._experiment.model,
        objective.backbone(params),
        images,
        masked=Masked.of(objective, params),
      )
    about = {
      'weights': title,
      'images': f'{len(images)} of {self._source.name}',
    }
    photographs = Photographs(originals, transform)
    gallery.save(self._workdir / gallery.FOLDER, found, about, photographs)
