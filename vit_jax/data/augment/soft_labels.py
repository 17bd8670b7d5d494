"""Labels as shares of the classes, for data of which some are soft."""

import dataclasses

import numpy as np

from vit_jax.data.augment import transforms
from vit_jax.data.contract import Example, Spec
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.sources.pseudo_labels import SOFT
from vit_jax.errors import UserError, check_range


@dataclasses.dataclass(frozen=True)
class TrainTransform(transforms.TrainTransform):
  """`transforms.TrainTransform`, with `label` float32 `[num_classes]`.

  It is an example's `soft` where there is one (`sources/pseudo_labels.py`);
  else all of it is the label's class, less what smoothing gives to all.

  Attributes:
    num_classes: number of classes of the data.
    label_smoothing: α of examples without soft labels, in [0, 1): 1 − α at the
      label and α / num_classes everywhere.

  Reference: Noisy Student, Xie et al., arXiv 1911.04252, whose code smooths
  labels of people and leaves the teacher's as they are.
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
    """`image`, uint8 `[height, width, 3]`, and `label`, float32 `[classes]`."""
    label = ((self.num_classes,), np.dtype(np.float32))
    return super().spec | {'label': label}

  def __call__(
    self, example: Example, rng: np.random.Generator | None = None
  ) -> dict[str, np.ndarray | int]:
    """Returns image and label; raises DecodeError."""
    found = super().__call__(example, rng)
    if SOFT not in example:
      return found | {'label': self._hard(int(example['label']))}
    soft: np.ndarray = np.asarray(example[SOFT], np.float32)
    if soft.shape != (self.num_classes,):
      raise UserError(
        f'soft labels are of {len(soft)} classes, and augment.num_classes is '
        f'{self.num_classes}: set it to the number of classes of the data.'
      )
    return found | {'label': soft}

  def _hard(self, label: int) -> np.ndarray:
    if not 0 <= label < self.num_classes:
      raise DecodeError(f'label {label}; allowed: 0 to {self.num_classes - 1}')
    spread = self.label_smoothing / self.num_classes
    shares = np.full(self.num_classes, spread, np.float32)
    shares[label] += 1 - self.label_smoothing
    return shares
