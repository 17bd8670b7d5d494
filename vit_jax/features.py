"""Computes features: python -m vit_jax.features --checkpoint=P … --out=DIR.

The features are those of a frozen model, for one of the following:
- a split, with the flags of `evaluate`: --dataset=NAME --split=S, --data_dir=D
  and --config.source.KEY=…
- the training split of a config, or another one with --split:
  --config=configs/cifar10.py
- image files: IMAGE…, where a directory means the images in it at any depth

The directory contains description.json (class names, preprocessing, …) and
parts, .npz files with columns of equal length: `features` float32 `[n, d]` (or
`[n, …, d]`, see `predictor`), `index` of the example in the source (bad records
are left out), `label` if the source has labels (or `labels` or `numbers`, see
`data.contract.TARGETS`), and `path` for image files. In Python,
`vit_jax.read_features(DIR)` returns the columns of all parts. After an
interruption, the same command computes the missing parts.

--tokens writes the patch tokens instead of one vector per image, and
--layers=-1,-4 the outputs of the last block and of the fourth from the end.
"""

import dataclasses
import functools
import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from vit_jax.cli import computation, inputs, process
from vit_jax.cli.computation import Predict
from vit_jax.cli.fields import flag
from vit_jax.cli.inputs import Data
from vit_jax.config import overrides
from vit_jax.data import filters
from vit_jax.data.contract import TARGETS, Source
from vit_jax.data.storage import files
from vit_jax.data.storage.class_folders import UNLABELLED
from vit_jax.data.storage.parts import Arrays, Parts
from vit_jax.errors import UserError
from vit_jax.evaluators.contract import Batch, not_finite_error
from vit_jax.weights.contract import Pretrained

PyTree = Any


class Images(Source):
  """Image files in a given order."""

  def __init__(self, paths: Sequence[str]):
    """Stores the paths; each file is opened when its example is read."""
    self.paths, self.name = [*paths], f'{len(paths)} images'

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> dict[str, Any]:
    return {'image': files.read_image(self.paths[index])}

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Checksum of the paths."""
    text = b'\n'.join(map(os.fsencode, self.paths))
    return {'paths': hashlib.sha256(text).hexdigest()[:16]}

  def where(self, index: int) -> str:
    """Returns the path of the file."""
    return self.paths[index]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(computation.Request):
  """Weights and data of the command `features`.

  Attributes:
    images: image files, directories and patterns; if empty, the features are
      those of a split.
  """

  images: Sequence[str] = ()
  tokens: bool = flag('Write patch tokens, [images, tokens, width].', False)
  layers: Sequence[int] = flag(
    'Blocks whose outputs are written, such as -1,-4: numbers from 0, or from '
    '-1 for the last block.',
    (),
  )


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


def _has_labels(source: Source) -> bool:
  """Returns whether the examples of a source have labels."""
  return list(source.class_names) not in ([], [UNLABELLED])


def _columns(source: Source, result: Arrays, index: np.ndarray) -> Arrays:
  """Returns the columns of a batch, see `computation.compute`.

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


def define_flags() -> None:
  """Defines the flags of this command."""
  computation.define_flags(Request)


def run(checkpoint: str, out: str, request: Request) -> dict[str, Any]:
  """Computes features and writes them.

  Args:
    checkpoint: workdir, step directory or weights in any format.
    out: local directory for the parts.
    request: data and further settings.

  Returns:
    The description of the result, see `parts.Computation`, with the number of
    usable examples and the shape of all features.

  Raises:
    UserError: the checkpoint or the data does not exist, a record is bad, or
      the directory is the result of other weights, data or settings.
  """
  weights = inputs.open_weights(checkpoint, request)
  if request.images:
    config = overrides.apply(inputs.sections(weights), [*request.settings])
    source = Images(inputs.image_paths(request.images))
    data = Data(config, source)
  else:
    data = inputs.open_data(weights, request)
    source = filters.without(data.source, data.left_out)
    data = data._replace(source=source)
  chosen: dict[str, Any] = dict(layers=[*request.layers], tokens=request.tokens)
  return computation.compute(
    out,
    weights,
    request,
    data,
    predict=predictor(weights, **chosen),
    columns=functools.partial(_columns, source),
    class_names=[*source.class_names] if _has_labels(source) else [],
    settings=chosen,
    summarise=_sizes,
  )


def _sizes(parts: Parts) -> dict[str, Any]:
  """Returns the number of examples, and the shape of all features.

  Raises:
    UserError: all examples are bad records.
  """
  count = sum(map(len, parts.column('index')))
  if not count:
    raise UserError(
      f'none of the examples of {parts.computation.data} can be used; see the '
      'log.'
    )
  shape = [count, *parts.read(0)['features'].shape[1:]]
  return {'count': count, 'shape': shape, 'width': shape[-1]}


def main(arguments: list[str]) -> None:
  """Writes the parts and prints a summary of their content."""
  values = flags.FLAGS
  data = values.dataset or values.config or values.split or values.data_dir
  if not values.checkpoint or not values.out or (arguments and data):
    raise process.usage(
      'features --checkpoint=PATH --out=DIR with either --dataset=NAME '
      '--split=S, or --config=FILE.py, or IMAGE…'
    )
  process.start_process()
  layers = parse_layers(values.layers)
  request = Request.of_flags(images=arguments, layers=layers)
  result = run(inputs.weights_path(values), values.out, request)
  computation.print_summary(values.out, result)


if __name__ == '__main__':
  process.run(main, define_flags)
