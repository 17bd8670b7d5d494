"""Training transform for data that contains soft labels."""

import dataclasses

import numpy as np

from vit_jax.data.augment import targets, transforms
from vit_jax.data.contract import Example, Spec
from vit_jax.data.sources.pseudo_labels import SOFT
from vit_jax.errors import check_range


@dataclasses.dataclass(frozen=True)
class TrainTransform(transforms.TrainTransform):
  """`transforms.TrainTransform` whose `label` is float32 `[num_classes]`.

  The label is the example's value `soft` if it exists (see
  `sources/pseudo_labels.py`), and otherwise the one-hot vector of the integer
  label, with label smoothing.

  Attributes:
    num_classes: number of classes of the data.
    label_smoothing: α in [0, 1) for examples without soft labels: every class
      has the value α / num_classes, and the label has 1 − α more.

  Reference: Noisy Student, Xie et al., arXiv 1911.04252. As in its code, human
  labels are smoothed and the teacher's labels are not.
  """

  num_classes: int = dataclasses.field(kw_only=True)
  label_smoothing: float = dataclasses.field(default=0.0, kw_only=True)

  def __post_init__(self):
    super().__post_init__()
    check_range('augment.num_classes', self.num_classes, at_least=1)
    check_range(
      'augment.label_smoothing', self.label_smoothing, at_least=0, below=1
    )

  @property
  def spec(self) -> Spec:
    """Spec of `image`, and of `label`, float32 `[num_classes]`."""
    label = ((self.num_classes,), np.dtype(np.float32))
    return super().spec | {'label': label}

  def __call__(
    self, example: Example, rng: np.random.Generator | None = None
  ) -> Example:
    """Returns `image` and `label`; raises DecodeError for a bad record."""
    result = super().__call__(example, rng)
    label = example.get(SOFT)
    if label is None:
      one_hot = targets.multi_hot(example, 'label', self.num_classes)
      added_to_all = np.float32(self.label_smoothing / self.num_classes)
      label = added_to_all + np.float32(1 - self.label_smoothing) * one_hot
    return result | {'label': np.asarray(label, np.float32)}
