"""Top-k accuracy, likelihood and calibration over a split."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from vit_jax.data.augment import targets
from vit_jax.data.contract import Example, Spec
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.evaluators import contract
from vit_jax.evaluators.features import OnSplit, OtherSource

PyTree = Any
_AMONG = ('all', 'present')
_NO_RANK = jnp.iinfo(jnp.int32).max  # rank of a class if a logit is NaN


@dataclasses.dataclass(eq=False, kw_only=True)
class Evaluator(OnSplit):
  """Top-k accuracies, negative log-likelihood and expected calibration error.

  A top-k prediction is correct if one of its k classes is a label of the image.
  Classes with equal logits are ordered as by argmax; if a logit is NaN, no
  prediction is correct. Probabilities are those of a softmax over the classes
  that may be predicted (`among`), or of a sigmoid for each class if the
  objective uses it; then `nll` is the sum of their cross-entropies. The values
  of all examples are summed on the host in float64, so that the result does not
  depend on the batch size, the padding, or the number of devices or processes.

  With several labels per image (ImageNet's reassessed labels: Beyer et al.,
  arXiv 2006.07159), `nll` is not computed, because it needs a single label, and
  the calibration is that of the top-1 prediction. Images without labels are
  left out.

  Attributes:
    source: section of another source, whose labels are indices of the head's
      classes; by default the run's own source.
    top: values of k for the top-k accuracies; accuracy (k = 1) is always
      reported.
    bins: number of bins of equal width in [0, 1], for the calibration error.
    among: classes that may be predicted: 'all', or 'present' for the labels of
      the examples of the split (200 of 1,000 for ImageNet-A and -R).
    labels: 'label', or the field of a source with several labels per image
      ('real_label' of the TFDS set imagenet2012_real, which its key
      `source.others` also names).

  Raises:
    UserError: the model has no head; the data or field does not exist; the data
      has more classes than the head; or a value is out of range.
  """

  higher_is_better, lower_is_better = ('accuracy', 'top*'), ('nll', 'ece')

  source: OtherSource = None
  top: tuple[int, ...] = (1, 5)
  bins: int = 15
  among: str = 'all'
  labels: str = 'label'

  def __post_init__(self):
    check_range('bins', self.bins, at_least=1)
    for each in self.top:
      check_range('top', each, at_least=1)
    check_choice('among', self.among, _AMONG)
    contract.check_head(self.setting, 'calibration')
    super().__post_init__()
    num_classes = self.setting.num_classes
    if self._source.num_classes > num_classes:
      raise UserError(
        f'{self._source.name} has {self._source.num_classes} classes, but the '
        f'head has {num_classes}: use data with the classes of the head.'
      )
    if self.labels != 'label':
      transform = _MultiLabel(self.setting.transform, self.labels, num_classes)
      self.setting = self.setting._replace(transform=transform)
    self._values = self.setting.compiled(self._example_values)
    self._competing: Bool[np.ndarray, ' k'] | None = (
      np.ones(num_classes, bool) if self.among == 'all' else None
    )

  def run(self, params: PyTree) -> dict[str, float]:
    """Computes the metrics of the split.

    Returns:
      'accuracy', 'top5' and so on in [0, 1]; 'nll' in nats (not with several
      labels); 'ece' in [0, 1]; 'count', the number of examples used;
      'left_out', the number of images without labels.

    Raises:
      UserError: there is a bad record and the reader's policy is to stop, or no
        example could be used.
    """
    if self._competing is None:
      self._competing = self._present()
    values = self.setting.examples(
      (params, self._competing), self._source, self._values
    )
    kept = values['labelled']
    count = int(kept.sum())
    if not count:
      raise contract.no_example_error(self._source)
    rank = values['rank'][kept]
    confidence = values['confidence'][kept].astype(np.float64)
    correct = {'accuracy': rank < 1}
    correct |= {f'top{k}': rank < k for k in self.top if k != 1}
    metrics = {key: float(value.mean()) for key, value in correct.items()}
    if self.labels == 'label':
      metrics['nll'] = float(values['nll'][kept].mean(dtype=np.float64))
    metrics['ece'] = calibration_error(confidence, rank < 1, self.bins)
    return metrics | {'count': count, 'left_out': len(kept) - count}

  def _example_values(self, state: PyTree, batch: PyTree) -> dict[str, Array]:
    """Computes the values of each example of a batch.

    Args:
      state: weights of the model, and whether each class may be predicted, bool
        `[k]`.
      batch: batch with a mask.

    Returns:
      Arrays `[n]`: 'rank', the number of classes that are more likely than the
      most likely correct one; 'confidence', the probability of the most likely
      class; 'nll' of the most likely correct class; 'labelled', whether the
      example has a label; 'mask'.
    """
    params, competing = state
    logits = self.setting.predict(params, batch)['logits'].astype(jnp.float32)
    logits = jnp.where(competing, logits, -jnp.inf)
    classes = jnp.arange(logits.shape[-1])
    correct = _correct_classes(batch[self.labels], logits.shape[-1])
    # A correct class is found even if its own logit is -inf.
    finite = jnp.maximum(logits, jnp.finfo(jnp.float32).min)
    best = jnp.where(correct, finite, -jnp.inf).argmax(axis=-1, keepdims=True)
    value = jnp.take_along_axis(logits, best, axis=-1)  # [n, 1]
    # Classes behind the best correct one, which itself is neither behind nor
    # ahead; equal logits are ordered by the number of the class.
    behind = (logits < value) | ((logits == value) & (classes > best))
    ahead = competing.sum() - 1 - (behind & competing).sum(axis=-1)
    if self.setting.objective.cross_entropy == 'sigmoid':
      total = jax.nn.softplus(logits).sum(axis=-1)
      confidence = jax.nn.sigmoid(logits.max(axis=-1))
    else:
      total = jax.nn.logsumexp(logits, axis=-1)
      confidence = jnp.exp(logits.max(axis=-1) - total)
    return {
      'rank': jnp.where(jnp.isnan(total), _NO_RANK, ahead),
      'confidence': confidence,
      'nll': total - value[:, 0],
      'labelled': correct.any(axis=-1),
      'mask': batch['mask'],
    }

  def _present(self) -> Bool[np.ndarray, ' k']:
    """Returns which classes are a label of an example, without the model."""

    def in_batch(_: None, batch: contract.Batch) -> Bool[Array, ' k']:
      correct = _correct_classes(batch[self.labels], self.setting.num_classes)
      return (correct & batch['mask'][:, None]).any(axis=0)

    results = self.setting.sweep(
      None, self._source, self.setting.compiled(in_batch)
    )
    return np.any(list(results), axis=0)


def calibration_error(
  confidence: Float[np.ndarray, ' n'],
  correct: Bool[np.ndarray, ' n'],
  bins: int,
) -> float:
  """Computes the expected calibration error over bins of equal width.

  It is the sum over bins of |B|/n · |accuracy(B) - mean confidence(B)|; bin m
  of M contains the confidences in ((m-1)/M, m/M].

  Args:
    confidence: probability of the predicted class, float64 in [0, 1].
    correct: whether the prediction is correct.
    bins: number of bins.

  Reference: Guo et al., arXiv 1706.04599, equation 3.
  """
  indices = np.ceil(np.nan_to_num(confidence) * bins) - 1
  indices = np.clip(indices, 0, bins - 1).astype(np.int64)
  gaps = np.bincount(indices, correct - confidence, minlength=bins)
  return float(np.abs(gaps).sum() / len(confidence))


def _correct_classes(labels: Array, num_classes: int) -> Bool[Array, 'n k']:
  """Returns whether each class is a label of each example.

  Args:
    labels: int `[n]` with one label per example, or bool `[n, k]`, which is
      returned unchanged.
    num_classes: number of classes, k.
  """
  if labels.ndim == 2:
    return labels
  return labels[:, None] == jnp.arange(num_classes)


@dataclasses.dataclass(frozen=True)
class _MultiLabel:
  """A transform whose results also contain several labels per image.

  Attributes:
    transform: transform of the run.
    key: name of the labels: a list of indices in an example of the source, bool
      `[num_classes]` in the result.
    num_classes: number of the head's classes.
  """

  transform: stream.Transform
  key: str
  num_classes: int

  @property
  def spec(self) -> Spec:
    """Spec of the transform, and of the labels."""
    entry = ((self.num_classes,), np.dtype(bool))
    return {**self.transform.spec, self.key: entry}

  def __call__(
    self, example: Example, rng: np.random.Generator | None = None
  ) -> dict[str, np.ndarray | int]:
    """Returns the preprocessed example with its labels.

    Raises:
      DecodeError: the image cannot be decoded, or a label is out of range.
      UserError: the source does not have the field of the labels.
    """
    row = targets.multi_hot(example, self.key, self.num_classes)
    return {**self.transform(example, rng), self.key: row}
