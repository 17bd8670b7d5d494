"""Labels images: python -m vit_jax.pseudo_label --checkpoint=PATH --out=F.npz.

A teacher predicts the labels of a split. The split is given with the flags of
`evaluate`: --dataset=NAME --split=S, --data_dir=D and --config.source.KEY=…, or
by a config: --config=configs/cifar10.py. Labels of the data are not used.
Images are preprocessed as for the teacher. Confident images are selected,
balanced over the classes. The source `pseudo_labels` reads the
file, so that any config can train on it, for example configs/noisy_student.py.
After an interruption, the same command continues and writes the same file.

Reference: "Self-training with Noisy Student improves ImageNet classification",
Xie et al., arXiv 1911.04252.
"""

import functools
import json
import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jaxtyping import Float, Int

from vit_jax.cli import output_parts, process, shared_flags
from vit_jax.cli.output_parts import Arrays, Parts
from vit_jax.cli.shared_flags import Request
from vit_jax.data import fingerprint
from vit_jax.data.contract import Source
from vit_jax.data.storage import npz
from vit_jax.errors import UserError
from vit_jax.evaluators.contract import Batch
from vit_jax.weights import pretrained

log = logging.getLogger('vit_jax')
PyTree = Any
# Keys of the description that are known only after the selection.
RESULTS = ('count', 'distinct', 'seen', 'confident', 'of_class')


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
    result: see `output_parts.compute`; `soft` has the probabilities.
    index: index of each example.
  """
  soft, mask = result['soft'], result['mask'] & ~np.isin(index, left_out)
  kept = mask & (soft.max(axis=-1) >= threshold)
  seen = np.array([mask.sum()], np.int64)
  return {'soft': soft[kept], 'index': index[kept], 'seen': seen}


def _write(about: dict[str, Any], parts: Parts, path: str) -> dict[str, Any]:
  """Selects examples from all parts and writes them to one file.

  Raises:
    UserError: no prediction is confident enough.
  """
  summaries = [
    (soft.argmax(axis=-1), soft.max(axis=-1)) for soft in parts.column('soft')
  ]
  labels, confidence = map(np.concatenate, zip(*summaries, strict=True))
  seen = sum(int(each.sum()) for each in parts.column('seen'))
  if not len(labels):
    raise UserError(
      f'{about["data"]}: the teacher predicts no class of {seen} images with '
      f'a probability of {about["min_confidence"]}: delete {parts.folder} and '
      'lower --min_confidence.'
    )
  copies = balanced(labels, confidence, about['per_class'], about['seed'])
  rows = np.flatnonzero(copies)
  of_class = np.bincount(labels, minlength=len(about['class_names']))
  empty = [about['class_names'][i] for i in np.flatnonzero(of_class == 0)]
  if empty:
    log.warning(
      '%d of the %d classes, for example %r, do not have any image with a '
      'confident prediction of the teacher; the student learns these classes '
      'only from labelled images',
      len(empty),
      len(of_class),
      empty[0],
    )
  description = about | {
    'count': int(copies.sum()),
    'distinct': len(rows),
    'seen': seen,
    'confident': len(labels),
    'of_class': of_class.tolist(),
  }
  description = json.loads(json.dumps(description))

  def selected(key: str) -> Iterator[np.ndarray]:
    """Yields the selected rows of a column, part by part."""
    start = 0
    for column in parts.column(key):
      yield column[copies[start : start + len(column)] > 0]
      start += len(column)

  columns = {
    'soft': lambda: selected('soft'),
    'index': lambda: selected('index'),
    'copies': lambda: [copies[rows]],
  }
  npz.write(path, columns, {'about': json.dumps(description)})
  return description


def define_flags() -> None:
  """Defines the flags of this command."""
  output_parts.define_flags('.npz')
  shared_flags.define('min_confidence', 'per_class', 'seed')


def run(checkpoint: str, out_path: str, request: Request) -> dict[str, Any]:
  """Labels images and writes the file.

  Args:
    checkpoint: the teacher: workdir, step directory or weights in any format.
    out_path: local path of the .npz file to write.
    request: data and further settings.

  Returns:
    The description that is stored in the file: checkpoint, data, seen,
    confident, count and further keys.

  Raises:
    UserError: the checkpoint or the data does not exist, the teacher does not
      have a head, a record is bad, or the file exists and was written with
      other weights, data or settings.
  """
  out = output_parts.check_path(out_path, ['.npz'])
  weights = shared_flags.open_weights(checkpoint, request)
  config, source, split, left_out = shared_flags.open_data(weights, request)
  about = {
    'source': config.source.to_dict(),
    'split': split,
    'fingerprint': source.fingerprint,
    'class_names': _class_names(weights, source),
    'min_confidence': request.min_confidence,
    'per_class': request.per_class,
    'seed': request.seed,
  }
  if len(left_out):  # files without this key remain valid
    about['left_out'] = fingerprint.checksum(left_out)
  threshold = np.float32(request.min_confidence)
  objective = weights.objective()

  def predict(params: PyTree, batch: Batch) -> dict[str, jax.Array]:
    logits = objective.predict(params, batch)['logits'].astype(jnp.float32)
    return {'soft': jax.nn.softmax(logits)}

  return output_parts.compute(
    out,
    weights,
    request,
    config,
    source,
    about,
    predict=predict,
    columns=functools.partial(_columns, left_out, threshold),
    write=_write,
    results=RESULTS,
  )


def _class_names(weights: pretrained.Pretrained, source: Source) -> list[str]:
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
  """Writes the file and prints a summary of its content."""
  values = flags.FLAGS
  if not values.checkpoint or not values.out or arguments:
    raise process.usage(
      'pseudo_label --checkpoint=PATH --out=F.npz with either --dataset=NAME '
      '--split=S or --config=FILE.py'
    )
  process.start_process()
  request, path = Request.of_flags(), shared_flags.weights_path(values)
  result = run(path, values.out, request)
  classes = len(result.pop('class_names'))
  result = {'out': values.out, **result, 'classes': classes}
  shared_flags.print_result(result)


if __name__ == '__main__':
  process.run(main, define_flags)
