"""The paper's figures of what a training has learnt, drawn as it goes.

They are those of `python -m vit_jax.analyze`, in WORKDIR/figures and on the
run's page. Nothing is measured.
"""

import functools
import logging
from typing import Any

import jax

from vit_jax.analysis import gallery
from vit_jax.analysis.figures import Masked, examine
from vit_jax.arrays.tree import PyTree
from vit_jax.config import durations, plugins
from vit_jax.errors import UserError, check_range
from vit_jax.evaluators.alone import on_main
from vit_jax.evaluators.contract import Setting
from vit_jax.evaluators.spread import Spread
from vit_jax.processes.consensus import from_main

log = logging.getLogger('vit_jax')


@plugins.operational('split', 'weights', 'num_images', 'every')
class Evaluator:
  """Draws figures; see `analysis.figures`. Of several processes, the first."""

  higher_is_better = ()
  judges = False  # `evaluate` takes another one by default

  def __init__(
    self,
    setting: Setting,
    /,
    *,
    split: str,
    weights: str = '',
    num_images: int = 32,
    every: str = '0 steps',
  ):
    """Opens the split.

    Args:
      setting: of the run.
      split: of which images are looked at.
      weights: '' for those that are trained, or the ending of others that the
        run evaluates: '_ema', '_teacher'.
      num_images: of which attention distance is the mean; Figure 11 has 128.
      every: duration between drawings; 0 steps for the end alone.

    Raises:
      UserError: no such data, no run to draw for, a value out of range.
    """
    durations.check('every', every)
    check_range('num_images', num_images, at_least=1)
    if setting.workdir is None or setting.objective is None:
      raise UserError(
        "the evaluator 'figures' draws into the workdir of a training. "
        '`python -m vit_jax.analyze --checkpoint=PATH` draws figures of any '
        'weights.'
      )
    self._setting, self.ending = setting, weights
    self._source = Spread(setting.open_source(split), num_images)

  def run(self, weights: PyTree) -> dict[str, float]:
    """No metrics. What cannot be drawn is told and ends no run."""
    setting, params = on_main(self._setting, weights)
    from_main(functools.partial(self._draw, setting, params))
    return {}

  def _draw(self, setting: Setting, params: PyTree) -> None:
    try:
      with jax.set_mesh(setting.mesh):
        self._examine(setting, params)
    except Exception as error:  # noqa: BLE001 (a picture is not worth a run)
      log.warning('no figures: %s: %s', type(error).__name__, error)

  def _examine(self, setting: Setting, params: PyTree) -> None:
    transform: Any = setting.transform
    images = self._source.images(transform)
    objective, workdir = setting.objective, setting.workdir
    assert objective is not None and workdir is not None  # see __init__
    found = examine(
      setting.model,
      objective.backbone(params),
      images,
      masked=Masked.of(objective, params),
    )
    about = {
      'weights': setting.judging(),
      'images': f'{len(images)} of {self._source.name}',
    }
    gallery.save(workdir / gallery.FOLDER, found, about)
