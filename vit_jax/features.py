"""Computes features: python -m vit_jax.features --checkpoint=P … --out=F.npz.

The features are those of a frozen model, for one of the following:
- a split, with the flags of `evaluate`: --dataset=NAME --split=S, --data_dir=D
  and --config.source.KEY=…
- the training split of a config, or another one with --split:
  --config=configs/cifar10.py
- image files: IMAGE…, where a directory means the images in it at any depth

The output is an .npz or .parquet file with columns of equal length: `features`
float32 `[n, d]` (or `[n, …, d]`, see `predictor`), `index` of the example in
the source (bad records are left out), `label` if the source has labels (or
`labels` or `numbers`, see `data.contract.TARGETS`), and
`path` for image files. It also contains class names and the preprocessing, in
`about`, a description as JSON. After an interruption, the same command
continues and gives the same file.

--tokens writes the patch tokens instead of one vector per image, and
--layers=-1,-4 the outputs of the last block and of the fourth from the end.
"""

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from vit_jax.cli import output_parts, process, shared_flags
from vit_jax.cli.output_parts import Arrays, Parts, pyarrow
from vit_jax.cli.shared_flags import Request, image_paths
from vit_jax.config import overrides
from vit_jax.data import filters
from vit_jax.data.contract import TARGETS, Source
from vit_jax.data.storage import files, npz
from vit_jax.data.storage.class_folders import UNLABELLED
from vit_jax.errors import UserError
from vit_jax.evaluators.contract import Batch, not_finite_error
from vit_jax.weights.contract import Pretrained

PyTree = Any
Predict = Callable[[PyTree, Batch], dict[str, jax.Array]]
# Keys of the description that are known only after the computation.
RESULTS = ('count', 'shape', 'width')


class Images(Source):
  """Image files in a given order."""

  def __init__(self, paths: Sequence[str]):
    """Stores the paths; each file is opened when its example is read."""
    self.paths, self.name = [*paths], f'{len(paths)} images'

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return {'image': files.read_image(self.paths[index])}

  def where(self, index: int) -> str:
    """Returns the path of the file."""
    return self.paths[index]


def parse_layers(numbers: Sequence[str]) -> list[int]:
  """Returns the indices of blocks that the flag --layers contains.

  Raises:
    UserError: a value is not an integer.
  """
  try:
    return [int(number) for number in numbers]
  except ValueError as error:
    raise UserError(
      f'--layers={",".join(numbers)} must be integers, such as --layers=-1,-4.'
    ) from error


def predictor(
  weights: Pretrained, *, layers: Sequence[int] = (), tokens: bool = False
) -> Predict:
  """Returns a function that computes the features.

  The last LayerNorm is applied to the output of each block, as in DINO's
  `get_intermediate_layers` (timm's function of this name needs `norm=True`).
  With `layers`, each block has the features that the model would have if it
  ended after this block: for a class token, the normalized class token.

  Args:
    weights: the model and its parameters.
    layers: indices of blocks; 0 is the first one, -1 the last one. Their order
      is that of the result. If () is given, only the last block is used.
    tokens: whether the features are all patch tokens, row by row, without a
      class token, distillation token or registers.

  Returns:
    Function of the parameters of the objective and of a batch. `features` is
    float32 `[n, d]`; with `layers` `[n, layers, d]`, with `tokens` `[n, t, d]`,
    and with both `[n, layers, t, d]`.

  Raises:
    UserError: the model does not have these results.
  """
  model, objective = weights.model(), weights.objective()
  if layers and not hasattr(model, 'last_norm'):
    raise UserError(
      f'--layers={",".join(map(str, layers))} needs a Vision Transformer, not '
      f'a {weights.description.model["name"]}: leave it out.'
    )

  def predict(params: PyTree, batch: Batch) -> dict[str, jax.Array]:
    if not layers and not tokens:
      return {'features': objective.predict(params, batch)['features']}
    want = ('layers',) if layers else ('patches',)
    x = objective.predict(params, batch, want)[want[0]]
    if not layers:  # [n, rows, columns, d]
      return {'features': x.reshape(len(x), -1, x.shape[-1])}
    variables, depth = {'params': objective.backbone(params)}, x.shape[1]
    if not -depth <= min(layers) <= max(layers) < depth:
      given = ','.join(map(str, layers))
      raise UserError(f'--layers={given}; allowed: {-depth} to {depth - 1}.')
    x = x[:, np.array(layers)]  # [n, layers, t, d]
    x = model.apply(variables, x, method='last_norm')
    if tokens:  # those of the patches are the last ones
      patches = math.prod(model.grid(batch['image'].shape[1:3]))
      return {'features': x[..., -patches:, :]}
    read = model.apply(variables, x.reshape(-1, *x.shape[2:]), method='readout')
    return {'features': read['features'].reshape(*x.shape[:2], -1)}

  return predict


def _npz(parts: Parts, path: str, about: dict[str, Any]) -> None:
  columns = {key: functools.partial(parts.column, key) for key in parts.read(0)}
  texts = {'class_names': about['class_names'], 'about': json.dumps(about)}
  npz.write(path, columns, texts)


def _parquet(parts: Parts, path: str, about: dict[str, Any]) -> None:
  pa, parquet = pyarrow(), pyarrow('pyarrow.parquet')
  metadata = {'about': json.dumps(about)}
  schema = _table(pa, parts.read(0)).schema.with_metadata(metadata)
  with parquet.ParquetWriter(path, schema) as writer:
    for number in range(len(parts)):
      table = _table(pa, parts.read(number))
      writer.write_table(table.replace_schema_metadata(metadata))


def _table(pa: Any, arrays: Arrays) -> Any:
  """Creates a pyarrow table of a part; features are lists of a fixed size.

  Features with more than two axes are nested lists.
  """
  columns = {}
  for key, array in arrays.items():
    columns[key] = pa.array(array.reshape(-1))
    for size in reversed(array.shape[1:]):
      columns[key] = pa.FixedSizeListArray.from_arrays(columns[key], size)
  return pa.table(columns)


FORMATS = {'.npz': _npz, '.parquet': _parquet}


def _has_labels(source: Source) -> bool:
  return list(source.class_names) not in ([], [UNLABELLED])


def _columns(source: Source, result: Arrays, index: np.ndarray) -> Arrays:
  """Returns the columns of a batch, see `output_parts.compute`.

  Raises:
    UserError: features are not finite.
  """
  mask = result['mask']
  columns = {'features': result['features'][mask], 'index': index[mask]}
  if not np.isfinite(columns['features']).all():
    raise not_finite_error('the features', source)
  if _has_labels(source):
    columns |= {key: result[key][mask] for key in TARGETS if key in result}
  if isinstance(source, Images):
    paths = [source.paths[i] for i in columns['index']]
    columns['path'] = np.array(paths, np.str_)
  return columns


def _write(about: dict[str, Any], parts: Parts, path: str) -> dict[str, Any]:
  """Writes all parts to one file; returns its description.

  Raises:
    UserError: all examples are bad records.
  """
  shapes = [features.shape for features in parts.column('features')]
  count = sum(n for n, *_ in shapes)
  if not count:
    raise UserError(
      f'none of the examples of {about["data"]} can be used; see the log.'
    )
  shape = [count, *shapes[0][1:]]
  description = about | {'count': count, 'shape': shape, 'width': shape[-1]}
  FORMATS[parts.out.suffix](parts, path, json.loads(json.dumps(description)))
  return description


def define_flags() -> None:
  """Defines the flags of this command."""
  output_parts.define_flags('.npz or .parquet')
  shared_flags.define('tokens', 'layers')


def run(checkpoint: str, out_path: str, request: Request) -> dict[str, Any]:
  """Computes features and writes them.

  Args:
    checkpoint: workdir, step directory or weights in any format.
    out_path: local path of the file to write.
    request: data and further settings.

  Returns:
    The description that is stored in the file: checkpoint, data, count, width,
    preprocess and further keys.

  Raises:
    UserError: the checkpoint or the data does not exist, a record is bad, or
      the file exists and was written with other weights, data or settings.
  """
  out = output_parts.check_path(out_path, FORMATS)
  if out.suffix == '.parquet':
    pyarrow('pyarrow.parquet')  # raises UserError if it is not installed
  weights = shared_flags.open_weights(checkpoint, request)
  if request.images:
    sections = shared_flags.sections(weights)
    config = overrides.apply(sections, [*request.settings])
    source = Images(image_paths(request.images))
    text = b'\n'.join(map(os.fsencode, source.paths))
    about = {'paths': hashlib.sha256(text).hexdigest()[:16]}
  else:
    config, source, _, left_out = shared_flags.open_data(weights, request)
    source = filters.without(source, left_out)
    about = {
      'source': config.source.to_dict(),
      'fingerprint': source.fingerprint,
    }
  names = [*source.class_names] if _has_labels(source) else []
  # Only keys that are set, so that files without them remain valid.
  chosen: dict[str, Any] = dict(layers=[*request.layers], tokens=request.tokens)
  chosen = {key: value for key, value in chosen.items() if value}
  return output_parts.compute(
    out,
    weights,
    request,
    config,
    source,
    about | {'class_names': names} | chosen,
    predict=predictor(weights, **chosen),
    columns=functools.partial(_columns, source),
    write=_write,
    results=RESULTS,
  )


def main(arguments: list[str]) -> None:
  """Writes the file and prints a summary of its content."""
  values = flags.FLAGS
  data = values.dataset or values.config or values.split or values.data_dir
  if not values.checkpoint or not values.out or (arguments and data):
    raise process.usage(
      'features --checkpoint=PATH --out=F.npz with either --dataset=NAME '
      '--split=S, or --config=FILE.py, or IMAGE…'
    )
  process.start_process()
  layers = parse_layers(values.layers)
  request = Request.of_flags(images=arguments, layers=layers)
  result = run(shared_flags.weights_path(values), values.out, request)
  classes = len(result.pop('class_names'))
  result = {'out': values.out, **result, 'classes': classes}
  shared_flags.print_result(result)


if __name__ == '__main__':
  process.run(main, define_flags)
