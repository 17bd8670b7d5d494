"""Applies weights to all examples, and writes the results in parts.

After an interruption, the same command computes only the missing parts. A lock
refuses a second writer.
"""

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import flags
from etils import epath
from jaxtyping import Int

from vit_jax.arrays import sharding
from vit_jax.cli import inputs, results
from vit_jax.cli.fields import flag
from vit_jax.cli.inputs import Data
from vit_jax.config.keys import MAX_BATCH_SIZE
from vit_jax.data.contract import TARGETS, Source
from vit_jax.data.filters import Chosen
from vit_jax.data.storage.parts import Arrays, Computation, Parts
from vit_jax.errors import UserError, check_range
from vit_jax.evaluators.batch_size import largest_batch_size
from vit_jax.evaluators.contract import Batch, Setting, joined
from vit_jax.files import paths
from vit_jax.processes import runtime
from vit_jax.processes.consensus import from_main
from vit_jax.run import lock
from vit_jax.training import frozen
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')
PyTree = Any
# Function of (parameters, batch) to arrays `[n, …]`.
Predict = Callable[[PyTree, Batch], dict[str, jax.Array]]
Columns = Callable[[Arrays, Int[np.ndarray, ' n']], Arrays]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(inputs.Request):
  """Weights and data of the commands `features` and `pseudo_label`."""

  part_examples: int = flag(
    'Images per written part, rounded up to whole batches.', 8192
  )

  def __post_init__(self):
    super().__post_init__()
    check_range(
      '--part_examples', self.part_examples, at_least=1, at_most=MAX_BATCH_SIZE
    )


def define_flags(kind: type[Request]) -> None:
  """Defines the flags of a command whose requests are of this class."""
  kind.define_data('weights', 'config')
  inputs.define_inputs('source, reader and preprocess')
  flags.DEFINE_string('out', None, 'Directory of the result.')


def compute(
  out: str,
  weights: Pretrained,
  request: Request,
  data: Data,
  *,
  predict: Predict,
  columns: Columns,
  class_names: list[str],
  settings: dict[str, Any],
  summarise: Callable[[Parts], dict[str, Any]],
) -> dict[str, Any]:
  """Applies frozen weights to all examples, and writes the results.

  All processes must call it. Existing parts are not computed again.

  Args:
    out: local directory of the result.
    weights: weights, see `inputs.open_weights`.
    request: request of the command.
    data: the examples.
    predict: function of (parameters, batch) to arrays `[n, …]`.
    columns: function of the results for a batch, with targets and `mask`, and
      of the index of each example, to the columns of the batch. Examples that
      cannot be used, which the mask excludes, are left out.
    class_names: class names of the result.
    settings: further settings on which the columns depend, JSON values.
    summarise: function of all parts to values of the summary, which the main
      process calls.

  Returns:
    The description of the result, see `parts.Computation`, and the summary.

  Raises:
    UserError: a record is bad; or the directory is the result of other weights,
      data or settings, or cannot be read or written.
  """
  folder = _folder(out)
  existing = from_main(lambda: _batch_size(folder))
  mesh, num_examples = sharding.make_mesh(jax.devices()), len(data.source)
  # An interrupted computation continues with its batch size.
  batch_size = request.batch_size or existing
  batch_size = batch_size or largest_batch_size(
    weights, mesh, predict=predict, examples=num_examples
  )
  setting = inputs.evaluation_setting(
    weights, data.config, lambda _: data.source, mesh, batch_size
  )
  with jax.set_mesh(mesh), contextlib.ExitStack() as stack:
    part_examples = _part_examples(request, weights, setting, predict)
    params = weights.load_weights(mesh)
    computation = Computation(
      checkpoint=weights.path,
      weights=request.weights,
      digest=frozen.digests({'': params})[''],
      data=data.source.name,
      source=data.config.source.to_dict() if 'source' in data.config else {},
      split=data.split,
      fingerprint=data.source.fingerprint,
      class_names=class_names,
      examples=num_examples,
      on_bad_record=data.config.reader.on_bad_record,
      preprocess=results.describe(weights, data.config),
      batch_size=setting.batch_size,
      part_examples=part_examples,
      settings=settings,
    )
    if runtime.is_main():
      with paths.access(folder, 'written'):
        folder.mkdir(parents=True, exist_ok=True)
      stack.enter_context(lock.hold(folder))
    parts = Parts(folder, computation)
    missing = from_main(lambda: Parts.begin(folder, computation).missing())
    if len(missing) < len(parts):
      log.info('%d of %d parts exist', len(parts) - len(missing), len(parts))
    _write_parts(parts, missing, setting, params, data.source, predict, columns)
  return computation.summary() | from_main(lambda: summarise(parts))


def _part_examples(
  request: Request, weights: Pretrained, setting: Setting, predict: Predict
) -> int:
  """Returns the number of examples per part, in whole batches.

  A part has the same size whether an example has one vector or many.
  """
  shape = setting.batch_size, *weights.image_size, weights.model().channels
  images = {'image': jax.ShapeDtypeStruct(shape, np.uint8)}
  abstract = weights.abstract_weights(setting.mesh)
  first, *_ = jax.tree.leaves(jax.eval_shape(predict, abstract, images))
  vectors = math.prod(first.shape[1:-1])  # of an example, from [n, …, d]
  batches = -(-request.part_examples // (setting.batch_size * vectors))
  return batches * setting.batch_size


def _write_parts(
  parts: Parts,
  missing: list[int],
  setting: Setting,
  params: PyTree,
  source: Source,
  predict: Predict,
  columns: Columns,
) -> None:
  """Computes and writes the parts with the given numbers, in one sweep."""

  def labelled(params: PyTree, batch: Batch) -> PyTree:
    kept = {key: batch[key] for key in (*TARGETS, 'mask') if key in batch}
    return predict(params, batch) | kept

  remaining = [np.zeros(0, np.int64), *map(parts.indices, missing)]
  examples = Chosen(source, np.concatenate(remaining))
  outputs = setting.sweep(params, examples, setting.compiled(labelled))
  size = setting.batch_size
  for number in missing:
    of_part = parts.indices(number)
    found = []
    for start in range(0, len(of_part), size):
      # A part consists of whole batches. The last one is shorter, because its
      # padding is left out.
      index = of_part[start : start + size]
      result = {k: v[: len(index)] for k, v in next(outputs).items()}
      found.append(columns(result, index))
    if runtime.is_main():
      parts.write(number, joined(found))
  from_main(lambda: None)  # the last part has been written


def print_summary(out: str, result: dict[str, Any]) -> None:
  """Prints the result of a command, with the number of classes only."""
  classes = len(result.pop('class_names'))
  results.print_result({'out': out, **result, 'classes': classes})


def _folder(out: str) -> epath.Path:
  """Returns the path of --out.

  Raises:
    UserError: the path is remote, or its name is that of a file.
  """
  paths.check_folder_name(out, 'a directory, into which parts are written')
  if paths.is_remote(out):
    raise UserError(f'--out={out} is remote: give a local directory.')
  return paths.locate(out)


def _batch_size(folder: epath.Path) -> int | None:
  """Returns the batch size of an existing result."""
  existing = Computation.read(folder)
  return existing and existing.batch_size
