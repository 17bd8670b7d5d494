"""Keys of a config that no other constructor has, with their defaults.

These are the keys outside of the sections, the keys of the training data, and
the keys that all evaluators have.
"""

import typing

from vit_jax.config import durations, schema
from vit_jax.config.schema import SECTIONS, Config, Nested, Section
from vit_jax.errors import UserError, check_range

# Largest image: 134 million pixels, 400 MB as RGB.
MAX_PIXELS = 2**27
# Larger than any real batch, but the row indices of a batch still fit into the
# memory of a host.
MAX_BATCH_SIZE = 2**26
_MAX_CLASSES = 2**31 - 1  # labels are int32


@schema.operational('early_stop_patience', 'paper_core_days', 'position_resize')
def top_level(
  *,
  seed: int = 0,
  total: str,
  batch_size: int,
  micro_batches: int = 1,
  image_size: tuple[int, ...],
  num_classes: int,
  average_decay: float | None = None,
  init_from: str | None = None,
  init_weights: str = 'params',
  position_resize: str | None = None,
  early_stop_patience: int | None = None,
  paper_core_days: float | None = None,
) -> None:
  """Declares and checks the keys of a config outside its sections.

  Args:
    seed: seed of initialization, order, augmentation and dropout; 32 bits.
    total: length of the training, a duration ('90 epochs') above 0.
    batch_size: number of examples in a global batch.
    micro_batches: number of parts in which a batch is computed, one after the
      other; their gradients are averaged.
    image_size: (height, width) in pixels, or one number for both.
    num_classes: number of outputs of the head; 0 for a model without a head.
    average_decay: decay of the moving average of parameters, between 0 and 1;
      the average is evaluated in addition to the parameters. None for no
      average.
    init_from: weights that the training starts from: a workdir, a checkpoint
      step directory or a file of any known format. Pre-training uses all
      parameters that fit the model, fine-tuning all except the head.
    init_weights: set of weights in `init_from`: 'params', 'ema' for the
      moving average, or another set of its objective ('teacher' for DINO).
    position_resize: method of interpolation for positions in `init_from`, see
      `positions.METHODS`; None for the method of the project that the weights
      are from. It has no effect on a run that resumes.
    early_stop_patience: number of evaluations without a new best value of the
      metric `checkpoint.best` after which the run ends; None to train to the
      end. The schedule still has the length `total`.
    paper_core_days: TPUv3 core-days that the paper reports, for comparison.

  Raises:
    UserError: a number is outside its range. The other keys are checked where
      they are used.
  """
  del image_size, init_from, init_weights, position_resize
  check_range('seed', seed, at_least=0, at_most=2**32 - 1)
  durations.check('total', total, positive=True)
  check_range('batch_size', batch_size, at_least=1, at_most=MAX_BATCH_SIZE)
  check_range('micro_batches', micro_batches, at_least=1)
  check_range('num_classes', num_classes, at_least=0, at_most=_MAX_CLASSES)
  check_range('average_decay', average_decay, above=0, below=1)
  check_range('early_stop_patience', early_stop_patience, at_least=1)
  check_range('paper_core_days', paper_core_days, above=0)


@schema.operational('leave_out')
def train_data(
  *,
  split: str,
  num_examples: int,
  repeats: int = 1,
  leave_out: str | None = None,
  balanced: bool = False,
) -> None:
  """Declares and checks the keys of the training data.

  Args:
    split: split of the source, in the syntax of TFDS.
    num_examples: number of examples of the split, which defines the length of
      an epoch; it is compared with the source.
    repeats: number of copies of each example in a batch, augmented
      independently (repeated augmentation: 3 in DeiT). An epoch still has
      `num_examples` images, which come from `num_examples / repeats` examples.
    leave_out: list of examples that are not used, which `check_data --against`
      writes, for example because they are also in a test set. `num_examples` is
      the number of remaining examples. The path may change when a run is
      resumed; the examples that are left out may not.
    balanced: whether each class is drawn equally often, see
      `data.balanced.Balanced`. An epoch still has `num_examples` images, so an
      example of a rare class occurs several times in it.

  Raises:
    UserError: a number is outside its range.
  """
  del split, leave_out, balanced
  check_range('train.num_examples', num_examples, at_least=1, at_most=2**62)
  check_range('train.repeats', repeats, at_least=1, at_most=64)


def length(config: Config) -> durations.Length:
  """Checks the keys of `top_level` and `train_data`; returns the length.

  Args:
    config: completed config.

  Raises:
    UserError: one of these values is invalid.
  """
  schema.construct(top_level, config)
  schema.construct(train_data, config.train)
  return durations.Length.of(config)


def square(
  image_size: tuple[int, ...], key: str = 'image_size'
) -> tuple[int, int]:
  """Returns (height, width); (s,) is a short form of (s, s).

  The flag `--config.image_size=384` results in (384,).

  Raises:
    UserError: the size is not one or two positive numbers, or is too large.
  """
  if len(image_size) not in (1, 2) or min(image_size) < 1:
    raise UserError(
      f'{key} is {image_size}: give one positive number or two, in pixels.'
    )
  height, width = image_size[0], image_size[-1]
  check_range(f'height x width of {key}', height * width, at_most=MAX_PIXELS)
  return height, width


def evaluation(
  *,
  every: str = '1 epochs',
  batch_size: int | None = None,
  image_size: tuple[int, ...] | None = None,
  preprocess: typing.Annotated[
    Section | None, Nested(SECTIONS['preprocess'])
  ] = None,
) -> None:
  """Declares and checks the keys that all sections of `config.evals` have.

  Args:
    every: duration between evaluations during training. The last step is
      always evaluated; '0 steps' for no other evaluation.
    batch_size: global batch size; by default that of training.
    image_size: (height, width) in pixels, or one number for both; by default
      that of the training.
    preprocess: preprocessing of the images; by default that of the config.

  Raises:
    UserError: a value is invalid.
  """
  del image_size, preprocess
  durations.check('every', every)
  check_range('batch_size', batch_size, at_least=1, at_most=MAX_BATCH_SIZE)
