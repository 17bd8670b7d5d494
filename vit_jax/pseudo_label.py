"""Labels images: python -m vit_jax.pseudo_label --checkpoint=PATH --out=DIR.

A teacher predicts the labels of a split. The split is given with the flags of
`evaluate`: --dataset=NAME --split=S, --data_dir=D and --config.source.KEY=…, or
by a config: --config=configs/cifar10.py. Labels of the data are not used.
Images are preprocessed as for the teacher. The labels of confident images are
written in parts, and the number of copies of each, which balance the classes,
to selection.npz. The source `pseudo_labels` reads the directory, so that any
config can train on it, for example configs/noisy_student.py. After an
interruption, the same command computes the missing parts.

Reference: "Self-training with Noisy Student improves ImageNet classification",
Xie et al., arXiv 1911.04252.
"""

import dataclasses
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Float, Int

from vit_jax.cli import computation, inputs, process
from vit_jax.cli.fields import flag
from vit_jax.data import fingerprint
from vit_jax.data.contract import Source
from vit_jax.data.sources.pseudo_labels import SELECTION
from vit_jax.data.storage.parts import Arrays, Parts, save
from vit_jax.errors import UserError, check_range
from vit_jax.evaluators.contract import Batch
from vit_jax.objectives import losses
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')
PyTree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(computation.Request):
  """Weights and data of the command `pseudo_label`."""

  min_confidence: float = flag(
    'Smallest probability of the most likely class.', 0.3
  )
  per_class: int = flag(
    'Number of examples of each class, including copies; 0 for no balancing.',
    0,
  )
  seed: int = flag(
    'Seed of the random choice of images that get an additional copy.', 0
  )

  def __post_init__(self):
    super().__post_init__()
    check_range('--min_confidence', self.min_confidence, at_least=0, at_most=1)
    check_range('--per_class', self.per_class, at_least=0)
    check_range('--seed', self.seed, at_least=0)


def balanced(
  labels: Int[np.ndarray, ' n'],
  confidence: Float[np.ndarray, ' n'],
  per_class: int,
  seed: int,
) -> Int[np.ndarray, ' n']:
  """Selects the same number of examples of each class.

  If a class has more images, the most confident ones are selected, and the
  first of equally confident ones. If it has fewer, all its images get the same
  number of copies, and randomly chosen images an additional one, so that the
  number is exact.

  Args:
    labels: class of each image.
    confidence: predicted probability of that class, in [0, 1].
    per_class: number of examples of each class; 0 selects every image once.
    seed: seed of the choice of images that get an additional copy.

  Returns:
    Number of copies of each image; 0 if it is not selected.

  Reference: Noisy Student, Xie et al., arXiv 1911.04252, section 3.1: 130K
  images per class, duplicated at random. Difference: its code draws for each
  image independently whether it gets an additional copy; here the number of
  examples per class is exact.
  """
  copies = np.ones(len(labels), np.int64)
  if per_class:
    copies[:] = 0
    for label in np.unique(labels):
      rows = np.flatnonzero(labels == label)
      rows = rows[np.argsort(-confidence[rows], kind='stable')][:per_class]
      quotient, remainder = divmod(per_class, len(rows))
      copies[rows] = quotient
      rng = np.random.default_rng([seed, int(label)])
      copies[rng.permutation(rows)[:remainder]] += 1
  return copies


def _columns(
  left_out: Int[np.ndarray, ' n'],
  threshold: np.float32,
  result: Arrays,
  index: np.ndarray,
) -> Arrays:
  """Returns the confident rows of a batch and the number of its examples.

  Args:
    left_out: indices of examples that are not labelled. The stored indices
      remain those of all examples of the source.
    threshold: minimum probability of the most likely class.
    result: see `computation.compute`; `soft` has the probabilities.
    index: index of each example.
  """
  soft, mask = result['soft'], result['mask'] & ~np.isin(index, left_out)
  kept = mask & (soft.max(axis=-1) >= threshold)
  seen = np.array([mask.sum()], np.int64)
  return {'soft': soft[kept], 'index': index[kept], 'seen': seen}


def _select(parts: Parts, per_class: int, seed: int) -> dict[str, Any]:
  """Selects examples from all parts, and writes their numbers of copies.

  Args:
    parts: result of `_columns`.
    per_class: see `balanced`.
    seed: see `balanced`.

  Returns:
    The numbers of examples: count (with copies), distinct, seen, confident and
    of_class.

  Raises:
    UserError: no prediction is confident enough.
  """
  summaries = [(soft.argmax(-1), soft.max(-1)) for soft in parts.column('soft')]
  labels, confidence = map(np.concatenate, zip(*summaries, strict=True))
  seen = sum(int(each.sum()) for each in parts.column('seen'))
  result, names = parts.computation, parts.computation.class_names
  if not len(labels):
    raise UserError(
      f'{result.data}: the teacher predicts no class of {seen} images with a '
      f'probability of {result.settings["min_confidence"]}: delete '
      f'{parts.folder} and lower --min_confidence.'
    )
  copies = balanced(labels, confidence, per_class, seed)
  of_class = np.bincount(labels, minlength=len(names))
  empty = [names[i] for i in np.flatnonzero(of_class == 0)]
  if empty:
    log.warning(
      '%d of the %d classes, for example %r, do not have any image with a '
      'confident prediction of the teacher; the student learns these classes '
      'only from labelled images',
      len(empty),
      len(of_class),
      empty[0],
    )
  save(parts.folder / SELECTION, {'copies': copies})
  return {
    'count': int(copies.sum()),
    'distinct': int(np.count_nonzero(copies)),
    'seen': seen,
    'confident': len(labels),
    'of_class': of_class.tolist(),
  }


def define_flags() -> None:
  """Defines the flags of this command."""
  computation.define_flags(Request)


def run(checkpoint: str, out: str, request: Request) -> dict[str, Any]:
  """Labels images, and writes the labels and the selection.

  Args:
    checkpoint: the teacher: workdir, step directory or weights in any format.
    out: local directory for the parts.
    request: data and further settings.

  Returns:
    The description of the result, see `parts.Computation`, with the numbers of
    examples: count, distinct, seen, confident and of_class.

  Raises:
    UserError: the checkpoint or the data does not exist, the teacher does not
      have a head, a record is bad, or the directory is the result of other
      weights, data or settings.
  """
  weights = inputs.open_weights(checkpoint, request)
  data = inputs.open_data(weights, request)
  left_out = data.left_out
  threshold = np.float32(request.min_confidence)
  objective = weights.objective()

  def predict(params: PyTree, batch: Batch) -> dict[str, jax.Array]:
    logits = objective.predict(params, batch)['logits'].astype(jnp.float32)
    return {'soft': losses.PROBABILITIES[objective.cross_entropy](logits)}

  return computation.compute(
    out,
    weights,
    request,
    data,
    predict=predict,
    columns=functools.partial(_columns, left_out, threshold),
    class_names=_class_names(weights, data.source),
    settings={
      'min_confidence': request.min_confidence,
      'per_class': request.per_class,
      'seed': request.seed,
      'left_out': fingerprint.checksum(left_out) if len(left_out) else None,
    },
    summarise=functools.partial(
      _select, per_class=request.per_class, seed=request.seed
    ),
  )


def _class_names(weights: Pretrained, source: Source) -> list[str]:
  """Returns the names of the teacher's classes.

  They are the names that are stored with the teacher, or else the names of the
  data if their number is the same, or else numbers.

  Raises:
    UserError: the teacher does not have a head.
  """
  outputs = weights.objective().num_classes
  if not outputs or weights.objective().cross_entropy == 'squared':
    raise UserError(
      f'the model in {weights.path} predicts no classes: use another teacher.'
    )
  for names in (weights.description.class_names, source.class_names):
    if len(names) == outputs:
      return list(names)
  return [str(number) for number in range(outputs)]


def main(arguments: list[str]) -> None:
  """Writes the labels and prints a summary."""
  values = flags.FLAGS
  if not values.checkpoint or not values.out or arguments:
    raise process.usage(
      'pseudo_label --checkpoint=PATH --out=DIR with either --dataset=NAME '
      '--split=S or --config=FILE.py'
    )
  process.start_process()
  request, path = Request.of_flags(), inputs.weights_path(values)
  computation.print_summary(values.out, run(path, values.out, request))


if __name__ == '__main__':
  process.run(main, define_flags)
