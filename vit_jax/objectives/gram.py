"""Gram anchoring: DINOv3's additional loss (arXiv 2508.10104, section 4.2).

In long trainings the class token improves, but the patch tokens of an image
lose their differences. Their similarities to each other are therefore tied to
those of an earlier teacher.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from vit_jax.arrays import tree
from vit_jax.config import durations
from vit_jax.data.contract import Spec
from vit_jax.errors import UserError, check_range
from vit_jax.models.contract import Model, Size, abstract_params
from vit_jax.models.dino_head import unit
from vit_jax.models.positions import resized_map
from vit_jax.objectives import contract, dinov2
from vit_jax.objectives.mixing import normalize

PyTree = Any
_STEPS = ('10000 steps', '20000 steps', '30000 steps')


@dataclasses.dataclass(eq=False, kw_only=True)
class Objective(dinov2.Objective):
  """DINOv2's losses, and the Gram loss of the patch tokens.

  The Gram teacher is a backbone without gradients. Its input are the global
  crops at a higher resolution (`gram` of the transform `block_masks`), and its
  maps are reduced to the student's grid. Further extra state, unless the Gram
  teacher is frozen: `gram` (parameters of its backbone) and `gram_number`
  (number of replacements so far, int32).

  The other keys are those of `dinov2.Objective`.

  Attributes:
    gram: path of the first Gram teacher, an early teacher of the same model; ''
      for the parameters that the run starts from.
    gram_weight: weight of the Gram loss.
    gram_warmup: duration at the start of the run in which the weight rises
      linearly from 0.
    gram_replace: durations from the start of the run, in ascending order, after
      which the teacher of that time becomes the Gram teacher; () to keep the
      first one.

  Raises:
    UserError: a value is outside its range.
  """

  gram: str = ''
  gram_weight: float = 2.0
  gram_warmup: str = '1000 steps'
  gram_replace: tuple[str, ...] = _STEPS

  def __post_init__(self):
    super().__post_init__()
    check_range('objective.gram_weight', self.gram_weight, at_least=0)
    for duration in (self.gram_warmup, *self.gram_replace):
      durations.check('objective.gram_warmup or gram_replace', duration)
    steps = self.setting.steps
    self._gram_warmup = max(steps(self.gram_warmup), 1)
    self._replace = [steps(duration) for duration in self.gram_replace]
    # Outside of training, all durations are 0 steps.
    is_ascending = self._replace == sorted({*self._replace})
    if self.setting.transform and not is_ascending:
      raise UserError(
        f'objective.gram_replace is {self.gram_replace}, in steps '
        f'{self._replace}: give different durations in ascending order.'
      )

  @property
  def _moves(self) -> bool:
    """True if the Gram teacher is part of the state."""
    return bool(self.gram_replace) or not self.gram

  def frozen(self) -> dict[str, contract.Frozen]:
    """Returns the first Gram teacher, if it has a path.

    Raises:
      UserError: there are no weights, or their model is not that of the run.
    """
    if not self.gram:
      return {}
    first = self.setting.open_frozen(self.gram)
    old, new = _description(first), _description(self.setting)
    others = [k for k in old | new if old.get(k) != new.get(k)]
    if others:
      raise UserError(
        f'objective.gram={self.gram} is not a teacher of this model, because '
        f'these differ: {", ".join(others[:5])}. Give one of the same model '
        "and image size, or '' for the weights that the run starts from."
      )
    return {'gram': first}

  def check(self, spec: Spec) -> None:
    """Checks the batches as DINOv2 does, and the crops for the Gram teacher."""
    super().check(spec)
    if 'gram' not in spec:
      raise UserError(
        'the Gram teacher needs its own crops, which the transform does not '
        'make: set --config.augment.gram_scale=2.'
      )
    self._any_size_model()  # raises if the model has a fixed size

  def other_passes(self, spec: Spec) -> tuple[tuple[Model, Size], ...]:
    """Returns the passes over local crops and of the Gram teacher."""
    height, width = spec['gram'][0][1:3]
    own = self.setting.model, (height, width)
    return (*super().other_passes(spec), own)

  def start_extra(self, params: PyTree, extra: PyTree) -> PyTree:
    """Returns the state of DINOv2, and a Gram teacher like the student."""
    extra = super().start_extra(params, extra)
    if not self._moves:
      return extra
    number = jnp.zeros((), jnp.int32)
    return extra | {'gram': params['model'], 'gram_number': number}

  def terms(self, params: PyTree, inputs: contract.Inputs) -> dinov2.Terms:
    """Adds the Gram loss, with the metric `gram` without its weight."""
    terms, extra = super().terms(params, inputs), inputs.extra
    images = inputs.batch['gram']
    images = normalize(images.reshape(-1, *images.shape[2:]))
    anchor = extra['gram'] if self._moves else inputs.frozen['gram']
    if self._moves and self.gram:
      is_first = extra['gram_number'] == 0
      anchor = optax.tree.where(is_first, inputs.frozen['gram'], anchor)
    maps = self._any_size_model().apply(
      {'params': jax.lax.stop_gradient(anchor)},
      images,
      method='predict',
      want=('patches',),
    )['patches']
    loss = gram_loss(terms.patches, maps, self.grid)
    progress = jnp.minimum(inputs.step / self._gram_warmup, 1.0)
    losses = terms.losses | {'gram': self.gram_weight * progress * loss}
    return terms._replace(losses=losses, metrics=terms.metrics | {'gram': loss})

  def update_extra(
    self, params: PyTree, extra: PyTree, carry: PyTree, step: Int[Array, '']
  ) -> PyTree:
    """Updates the state of DINOv2, and replaces the Gram teacher when due."""
    new = super().update_extra(params, extra, carry, step)
    if not self._moves:
      return new
    never = jnp.iinfo(jnp.int32).max
    due = jnp.array([*self._replace, never])
    number = extra['gram_number']
    # Not `==`: a bad step updates nothing, and a later one then replaces it.
    replaced = step >= due[number]
    teacher = new['teacher']['model']
    gram = optax.tree.where(replaced, teacher, extra['gram'])
    return new | {'gram': gram, 'gram_number': number + replaced}


def _description(of: contract.Frozen | contract.Setting) -> dict[str, Any]:
  """Returns the options of a model, and the shapes of its parameters."""
  shapes = tree.flatten(abstract_params(of.model, of.image_size))
  return {**of.model.architecture, 'pixels': of.model.normalization, **shapes}


def gram_loss(
  tokens: Float[Array, 'm p d'],
  maps: Float[Array, 'm rows columns d'],
  grid: tuple[int, int],
) -> Float[Array, '']:
  """Computes the mean squared difference of cosine similarities of patches.

  Args:
    tokens: patch tokens of the student.
    maps: patch tokens of the Gram teacher, reduced to the grid by bicubic
      interpolation without antialiasing before they are scaled to length 1.
    grid: rows and columns of the student's patches.
  """

  def similarities(x: Float[Array, 'm p d']) -> Float[Array, 'm p p']:
    x = unit(x, axis=-1)
    return jnp.einsum('mpd,mqd->mpq', x, x, precision='highest')

  targets = resized_map(maps, grid)
  difference = similarities(tokens) - similarities(targets)
  return jnp.square(difference).mean()
