"""Computes features: python -m vit_jax.features --checkpoint=P … --out=F.npz.

The features are those of a frozen model, for one of the following:
- a split, with the flags of `evaluate`: --dataset=NAME --split=S, --data_dir=D
  and --config.source.KEY=…
- the training split of a config, or another one with --split:
  --config=configs/cifar10.py
- image files: IMAGE…, where a directory means the images in it at any depth

The output is an .npz or .parquet file of features, labels, and indices or
paths. It also contains class names and the preprocessing. After an
interruption, the same command continues and gives the same file.

--tokens writes the patch tokens instead of one vector per image, and
--layers=-1,-4 the outputs of the last block and of the fourth from the end.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from vit_jax.arrays import sharding
from vit_jax.cli import (
  batches,
  data_flags,
  preprocessing_flags,
  process,
  weights_and_data,
  weights_flags,
)
from vit_jax.cli.image_arguments import images_of
from vit_jax.cli.output_parts import batch_size, existing_result
from vit_jax.config import overrides
from vit_jax.config.completion import Config
from vit_jax.data import exclusion
from vit_jax.data.contract import Source
from vit_jax.errors import UserError
from vit_jax.evaluators.features import Extractor
from vit_jax.features import extraction, image_files, intermediate, writing
from vit_jax.files import paths
from vit_jax.training import frozen
from vit_jax.weights import pretrained

# Keys of the description that are known only after the computation.
RESULTS = ('count', 'shape', 'width')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(weights_and_data.Request):
  """Settings of the command.

  Attributes:
    images: image files, directories and patterns; if empty, the features of a
      split are computed.
    tokens: whether to write the patch tokens, see `intermediate.predictor`.
    layers: indices of the blocks to use; () for the features of the model.
  """

  images: Sequence[str] = ()
  tokens: bool = False
  layers: Sequence[int] = ()


def define_flags() -> None:
  """Defines the flags of this command."""
  weights_and_data.define_flags('.npz or .parquet')
  flags.DEFINE_bool(
    'tokens', False, 'Write patch tokens, [images, tokens, width].'
  )
  flags.DEFINE_list(
    'layers',
    [],
    'Blocks whose outputs are written, such as -1,-4: numbers from 0, or from '
    '-1 for the last block.',
  )


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
  if paths.is_remote(out_path):
    raise UserError(
      f'--out={out_path} is remote: give the path of a local file.'
    )
  out = paths.locate(out_path)
  writing.check(out)
  weights = weights_and_data.open_weights(checkpoint, request)
  config, source = _data(weights, request)
  mesh = sharding.make_mesh(jax.devices())
  # Only keys that are set, so that files without them remain valid.
  chosen: dict[str, Any] = {}
  if request.layers:
    chosen['layers'] = [*request.layers]
  if request.tokens:
    chosen['tokens'] = True
  predict = weights.objective().predict
  if chosen:
    predict = intermediate.predictor(weights, **chosen)
  rows = request.batch_size or batch_size(out)
  rows = rows or batches.fitting(
    weights, mesh, predict=predict, examples=len(source)
  )
  setting = data_flags.setting(weights, config, lambda _: source, mesh, rows)
  setting = setting._replace(predict=predict)
  extractor = Extractor(setting, None, 'the extraction of features')
  with jax.set_mesh(mesh):
    abstract = weights.abstract_params(mesh)
    vectors = 1
    if chosen:
      vectors = intermediate.vectors(setting, abstract, weights.image_size)
    params = weights.load(abstract)
    about = {
      'checkpoint': weights.path,
      'weights': request.weights,
      'digest': frozen.digests({'': params})[''],
      **extraction.describe_data(config, source),
      'preprocess': preprocessing_flags.describe(weights, config),
      'batch_size': setting.batch_size,
      **chosen,
    }
    done = existing_result(out, about, writing.about_of, RESULTS)
    if not done:
      # A part has the same size whether an example has one vector or many.
      size = -(-request.part_examples // (setting.batch_size * vectors))
      done = extraction.extract(extractor, params, source, out, about, size)
  return done


def _data(
  weights: pretrained.Pretrained, request: Request
) -> tuple[Config, Source]:
  """Opens the image files or the split.

  Returns:
    The completed config, and the source.

  Raises:
    UserError: the data or the split does not exist or is empty.
  """
  if request.images:
    sections = weights_and_data.sections(weights)
    config = overrides.apply(sections, [*request.settings])
    return config, image_files.Images(images_of(request.images))
  config, source, _, left_out = weights_and_data.open_data(weights, request)
  return config, exclusion.without(source, left_out)


def main(arguments: list[str]) -> None:
  """Writes the file and prints a summary of its content."""
  values = flags.FLAGS
  data = values.dataset or values.config or values.split or values.data_dir
  if not values.checkpoint or not values.out or (arguments and data):
    raise UserError(
      'usage: python -m vit_jax.features --checkpoint=PATH --out=F.npz with '
      'either --dataset=NAME --split=S, or --config=FILE.py, or IMAGE…; got '
      f'--checkpoint={values.checkpoint}, --out={values.out}, '
      f'{len(arguments)} image(s) and data {data!r}.'
    )
  process.start_process()
  layers = intermediate.parse_layers(values.layers)
  request = Request.of_flags(images=arguments, layers=layers)
  result = run(weights_flags.path(values), values.out, request)
  size = 'shape' if request.tokens or layers else 'width'
  weights_and_data.print_result(values.out, result, ('count', size))


if __name__ == '__main__':
  process.run(main, define_flags)
