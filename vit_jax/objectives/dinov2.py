"""DINOv2 and DINOv3: self-distillation of crops and of masked patches.

"DINOv2: Learning Robust Visual Features without Supervision", arXiv 2304.07193,
section 4. The loss of DINO on class tokens is extended by that of iBOT (arXiv
2111.07832) on masked patches and by the KoLeo regularizer (arXiv 1806.03198),
which spreads the features. DINOv3 (arXiv 2508.10104) has the same losses, other
values of the keys, and Gram anchoring (`gram`).
"""

import dataclasses
import functools
import math
import operator
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, Key

from vit_jax.config import schema
from vit_jax.config.schema import Nested, Section
from vit_jax.data.contract import Spec
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.models.contract import Masked, Patches
from vit_jax.models.dino_head import Head, unit
from vit_jax.objectives import dino, patches
from vit_jax.objectives.contract import Inputs, Loss, Mean
from vit_jax.objectives.health import feature_metrics

PyTree = Any
_HEAD = Nested('vit_jax.models.dino_head:Head')
CENTRING = ('centre', 'sinkhorn_knopp')
_GLOBAL = 2  # number of global crops, the inputs of the teacher
_ITERATIONS = 3  # of Sinkhorn-Knopp
_EPSILON = 1e-8  # added to distances
_STREAM = 0x64696E32  # folded into the key of the step
_ROWS = 8  # gathered patches are padded to a multiple, for layouts of TPUs


class Terms(NamedTuple):
  """Losses of a micro-batch, and what further losses may use.

  Attributes:
    losses: weighted losses by name; their sum is the loss.
    metrics: scalars for the log.
    carry: values for `update_extra`.
    patches: the student's patch tokens of the global crops, which are masked.
  """

  losses: dict[str, Array]
  metrics: dict[str, Array]
  carry: PyTree
  patches: Float[Array, 'm p d']


@dataclasses.dataclass(eq=False, kw_only=True)
class Objective(dino.Objective):
  """Losses of DINO, iBOT and KoLeo; an `objectives.contract.Objective`.

  Parameters: `model/…`, `mask` `[1, width]` (the mask token), `head/…` and, if
  they are separate, `patch_head/…` and `local_norm/{scale,bias}`. Extra state:
  `teacher`, the moving average of the parameters, and with centring `centre`
  and `patch_centre` `[k]`. A batch contains `global`, `local` and `masks` of
  the transform `block_masks`.

  The teacher computes targets from the global crops without masks. Masked
  patches are gathered for each group of examples, up to a fixed number, so that
  shapes are static and a mesh moves no tokens between devices if it does not
  split groups. Centres and Sinkhorn-Knopp use the whole micro-batch, on all
  devices; a centre is updated with the mean over all micro-batches.

  Attributes:
    setting: setting of the run, whose `model` has no head.
    student_temperature: divisor of the student's logits, above 0.
    teacher_temperature: divisor of the teacher's logits after the warm-up.
    warmup_temperature: divisor of the teacher's logits in the first step.
    temperature_warmup: duration of the warm-up, in which the temperature
      changes linearly with each step.
    momentum: weight of the old teacher in the first update; it becomes
      `momentum_end` along half a cosine.
    centring: 'centre' (the moving average of the teacher's logits is
      subtracted) or 'sinkhorn_knopp' (the targets of a micro-batch are
      distributed equally over the prototypes).
    koleo: weight of the KoLeo regularizer.
    momentum_end: weight of the old teacher in the last update; `momentum` for a
      constant weight (DINOv3).
    local_weight: factor of the terms of local crops in the loss of DINO.
    local_norm: whether the class tokens of local crops have a last norm of
      their own (DINOv3), which evaluation does not use.
    head: config section of the head of class tokens, see
      `models.dino_head.Config`.
    patch_head: config section of the head of patches; None for the same head.

  Raises:
    UserError: a value is outside its range, or the model has no tokens that can
      be masked.
  """

  name = 'dinov2'
  transform = 'block_masks'

  # Keys that are not repeated here have the defaults of DINO.
  teacher_temperature: float = 0.07
  temperature_warmup: str = '30 epochs'
  momentum: float = 0.992
  centring: str = 'centre'
  koleo: float = 0.1
  momentum_end: float = 1.0
  local_weight: float = 1.0
  local_norm: bool = False
  patch_head: Annotated[Section | None, _HEAD] = None

  def __post_init__(self):
    super().__post_init__()
    check_choice('objective.centring', self.centring, CENTRING)
    check_range(
      'objective.momentum_end', self.momentum_end, at_least=0, at_most=1
    )
    for key in ('koleo', 'local_weight'):
      check_range(f'objective.{key}', getattr(self, key), at_least=0)
    self.grid = patches.grid_of(self.setting, self.name)
    self._model: Any = self.setting.model  # has tokens that can be masked
    # Has `group` and `largest_count` of `block_masks`; None for evaluation.
    self._transform: Any = self.setting.transform
    self._patch_head: Any = None
    if self.patch_head is not None:
      self._patch_head = schema.construct(Head, self.patch_head)

  @property
  def sharding_rules(self) -> tuple[tuple[str, int], ...]:
    """Rules of the model, the heads and the centres."""
    head = self._head.sharding_rules
    patch_head = ((f'patch_head/{end}', dim) for end, dim in head)
    return (*super().sharding_rules, *patch_head, ('patch_centre', -1))

  def check(self, spec: Spec) -> None:
    """Checks that batches have crops and masks that fit the model.

    Raises:
      UserError: crops or masks are missing or have a wrong shape, a group has
        only one example, or the model has a head or does not accept the local
        crops.
    """
    super().check(spec)
    expected = (_GLOBAL, math.prod(self.grid))
    advice = f'augment.patch_size={self._model.patch_pixels}'
    self._check_shape(spec, 'masks', expected, advice)
    options = self._model.config
    if self.local_norm and not (
      options.pooling == 'token' and options.final_norm
    ):
      raise UserError(
        'objective.local_norm=True replaces the last norm of class tokens, but '
        f'model.pool is {options.pooling!r} and model.final_norm is '
        f"{options.final_norm}: set model.pool='token' and final_norm=True."
      )
    if self._transform.group < 2:
      raise UserError(
        'KoLeo compares the examples of a group, but augment.group is '
        f'{self._transform.group}: set it to 2 or more.'
      )

  def init(self, key: Key[Array, ''], batch: Any) -> tuple[PyTree, PyTree]:
    """Returns initial parameters, and the extra state of `start_extra`."""
    key, patch_key = jax.random.split(key)
    params, _ = super().init(key, batch)
    width = params['head']['fc1']['kernel'].shape[0]
    params['mask'] = jnp.zeros((1, width))
    if self._patch_head is not None:
      variables = self._patch_head.init(patch_key, jnp.zeros((1, width)))
      params['patch_head'] = variables['params']
    if self.local_norm:
      params['local_norm'] = params['model']['encoder']['norm']
    return params, self.start_extra(params, {})

  def start_params(self, params: PyTree, model: PyTree) -> PyTree:
    """Returns `params` with given parameters of the model.

    A norm of local crops that weights do not contain (it still has the initial
    values) becomes a copy of the model's.
    """
    params = super().start_params(params, model)
    if not self.local_norm:
      return params
    own = params['local_norm']
    is_initial = jnp.all(own['scale'] == 1) & ~jnp.any(own['bias'])
    norm = optax.tree.where(is_initial, model['encoder']['norm'], own)
    return params | {'local_norm': norm}

  def start_extra(self, params: PyTree, extra: PyTree) -> PyTree:
    """Returns a teacher that equals its student, and centres of zeros."""
    if self.centring != 'centre':
      return {'teacher': params}
    outputs = (self._patch_head or self._head).config.outputs
    centre = {'patch_centre': jnp.zeros(outputs)}
    return super().start_extra(params, extra) | centre

  def loss(self, params: PyTree, inputs: Inputs) -> Loss:
    """Computes the sum of the three losses; see `terms`."""
    terms = self.terms(params, inputs)
    loss = functools.reduce(operator.add, terms.losses.values())
    return loss, (terms.metrics, terms.carry)

  def terms(self, params: PyTree, inputs: Inputs) -> Terms:
    """Computes the three losses, to which a subclass may add others.

    Metrics are those of DINO, with `teacher_kl` of the class tokens, and
    `crop_loss`, `patch_loss` and `koleo` (without its weight).
    """
    views, extra = self._views(inputs.batch), inputs.extra
    masks = inputs.batch['masks'].reshape(-1, math.prod(self.grid))  # [2 n, p]
    index, weights = self._masked(masks)
    temperature = self.temperature_of_teacher(inputs.step)

    teacher = jax.lax.stop_gradient(extra['teacher'])
    teacher_features, tokens = self._tokens(teacher, views['global'], None)
    logits = self._logits(teacher, teacher_features)
    patch_logits = self._patch_logits(teacher, tokens, index)
    is_patch = weights.reshape(-1) > 0  # others are padding
    if self.centring == 'centre':
      targets = jax.nn.softmax((logits - extra['centre']) / temperature)
      patch_targets = jax.nn.softmax(
        (patch_logits - extra['patch_centre']) / temperature
      )
    else:
      all_rows = jnp.ones(len(logits), bool)
      targets = sinkhorn_knopp(logits / temperature, all_rows)
      patch_targets = sinkhorn_knopp(patch_logits / temperature, is_patch)

    key = jax.random.fold_in(inputs.key, _STREAM)
    global_key, local_key = jax.random.split(key)
    features, tokens = self._tokens(params, views['global'], global_key, masks)
    all_features = [features]
    if 'local' in views:
      of_local = self._of_local(params)
      all_features.append(self._features(of_local, views['local'], local_key))
    crop_loss, metrics = self._crop_loss(params, all_features, targets)

    outputs = self._patch_logits(params, tokens, index)
    outputs = outputs / self.student_temperature
    terms = dino.cross_entropies(patch_targets[:, None], outputs[:, None])
    # A mean over the patches of a crop, then over all crops, also those
    # without masked patches.
    patch_loss = (weights.reshape(-1) * terms[:, 0, 0]).sum() / len(masks)
    crops = features.reshape(-1, _GLOBAL, features.shape[-1])
    koleo = jnp.asarray(
      sum(
        koleo_loss(crops[:, i], self._transform.group) for i in range(_GLOBAL)
      )
    )
    losses = {
      'crop': crop_loss,
      'patch': patch_loss,
      'koleo': self.koleo * koleo,
    }
    metrics |= {'crop_loss': crop_loss, 'patch_loss': patch_loss}
    metrics |= {'koleo': koleo} | feature_metrics(teacher_features)
    carry = {}
    if self.centring == 'centre':
      # Micro-batches differ in the number of patches.
      carry = {
        'centre': logits.mean(axis=0),
        'patch_centre': Mean(
          jnp.where(is_patch[:, None], patch_logits, 0).sum(axis=0),
          is_patch.sum().astype(jnp.float32),
        ),
      }
    return Terms(losses, metrics, carry, tokens)

  def layers_above(self, path: str) -> int | tuple[int, ...]:
    """Returns the number of layers above; the mask token is below all."""
    return super().layers_above('model/cls' if path == 'mask' else path)

  def _tokens(
    self,
    params: PyTree,
    images: Float[Array, 'm y x c'],
    key: Key[Array, ''] | None,
    masks: Bool[Array, 'm p'] | None = None,
  ) -> tuple[Float[Array, 'm d'], Float[Array, 'm p d']]:
    """Returns features and patch tokens of global crops."""
    model, variables = self._model, {'params': params['model']}
    masked = None if masks is None else Masked(masks, params['mask'])
    x = model.apply(variables, images, masked, method='embed')
    x = model.apply(variables, x, key, Patches(self.grid), method='encode')
    features = model.apply(variables, x, method='readout')['features']
    return features, x[:, -math.prod(self.grid) :]

  def _of_local(self, params: PyTree) -> PyTree:
    """Returns the parameters for local crops, whose class token is used."""
    if not self.local_norm:
      return params
    model = params['model']
    encoder = model['encoder'] | {'norm': params['local_norm']}
    return params | {'model': model | {'encoder': encoder}}

  def _masked(
    self, masks: Bool[Array, 'm p']
  ) -> tuple[Int[Array, 'groups k'], Float[Array, 'groups k']]:
    """Returns the masked patches of each group, padded to a fixed number.

    Returns:
      Index of each patch among those of its group, and 1 / (number of masked
      patches of its crop); 0 for padding.
    """
    count = math.ceil(self._transform.largest_count / _ROWS) * _ROWS
    weights = masks / jnp.maximum(masks.sum(axis=1, keepdims=True), 1)
    crops = _GLOBAL * self._transform.group
    weights = weights.reshape(-1, crops * masks.shape[1])  # [groups, patches]
    # Masked patches first, in their order.
    index = jnp.argsort(weights == 0, axis=1, stable=True)[:, :count]
    return index, jnp.take_along_axis(weights, index, axis=1)

  def _patch_logits(
    self,
    params: PyTree,
    tokens: Float[Array, 'm p d'],
    index: Int[Array, 'groups k'],
  ) -> Float[Array, 'rows outputs']:
    """Computes the logits of the gathered patches of all groups."""
    width = tokens.shape[-1]
    tokens = patches.take(tokens.reshape(len(index), -1, width), index)
    tokens = tokens.reshape(-1, width)
    if self._patch_head is None:
      return self._logits(params, tokens)
    return self._patch_head.apply({'params': params['patch_head']}, tokens)

  def temperature_of_teacher(self, step: Int[Array, '']) -> Float[Array, '']:
    """Returns the divisor of the teacher's logits after `step` updates.

    It changes with each step, unlike that of DINO.
    """
    start, end = self.warmup_temperature, self.teacher_temperature
    if not self._warmup:
      return jnp.float32(end)
    progress = jnp.minimum(step / max(self._warmup - 1, 1), 1)
    return start + (end - start) * progress


def sinkhorn_knopp(
  logits: Float[Array, 'b k'], included: Bool[Array, ' b']
) -> Float[Array, 'b k']:
  """Computes targets that are distributed equally over the prototypes.

  exp(logits) is scaled three times such that all prototypes have the same sum,
  and then that each row has the sum 1. Only the factors are computed, as
  logarithms, so that large logits do not overflow.

  Args:
    logits: logits divided by the temperature.
    included: whether each row takes part; others are padding.

  Reference: SwAV (arXiv 2006.09882), Algorithm 1.
  """
  rows = jnp.zeros((len(logits), 1))
  columns = jnp.zeros((1, logits.shape[1]))
  for _ in range(_ITERATIONS):
    scaled = jnp.where(included[:, None], logits + rows, -jnp.inf)
    columns = -jax.nn.logsumexp(scaled, axis=0, keepdims=True)
    rows = -jax.nn.logsumexp(logits + columns, axis=1, keepdims=True)
  return jnp.exp(logits + rows + columns)


def koleo_loss(features: Float[Array, 'n d'], group: int) -> Float[Array, '']:
  """Computes −mean log(distance to the nearest other example of the group).

  Args:
    features: features of one crop of each example; they are scaled to length 1.
    group: number of adjacent examples that are compared.

  Reference: arXiv 1806.03198, section 4.
  """
  x = unit(features, axis=-1).reshape(-1, group, features.shape[-1])
  similarity = jnp.einsum('gid,gjd->gij', x, x, precision='highest')
  similarity = jnp.where(jnp.eye(group, dtype=bool), -jnp.inf, similarity)
  nearest = similarity.argmax(axis=-1)
  # The small constant makes the gradient of equal features finite.
  difference = x - patches.take(x, nearest) + _EPSILON
  distance = jnp.sqrt(jnp.square(difference).sum(axis=-1))
  return -jnp.log(distance + _EPSILON).mean()
