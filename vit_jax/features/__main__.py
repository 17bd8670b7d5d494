"""Computes features: python -m vit_jax.features --checkpoint=P … --out=F.npz.

The features are those of a frozen model, for one of the following:
- a split, with the flags of `evaluate`: --dataset=NAME --split=S, --data_dir=D
  and --config.source.KEY=…
- the training split of a config, or another one with --split:
  --config=configs/cifar10.py
- image files: IMAGE…

The output is an .npz or .parquet file of features, labels, and indices or
paths. It also contains class names and the preprocessing. After an
interruption, the same command continues and gives the same file.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags

from vit_jax.arrays import sharding
from vit_jax.cli import (
  data_flags,
  preprocessing_flags,
  process,
  weights_and_data,
  weights_flags,
)
from vit_jax.cli.output_parts import existing_result
from vit_jax.config import overrides
from vit_jax.config.completion import Config
from vit_jax.data.contract import Source
from vit_jax.errors import UserError
from vit_jax.evaluators.features import Extractor
from vit_jax.features import extraction, image_files, writing
from vit_jax.files import paths
from vit_jax.training import frozen
from vit_jax.weights import pretrained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(weights_and_data.Request):
  """Settings of the command.

  Attributes:
    images: paths of image files; if empty, the features of a split are
      computed.
  """

  images: Sequence[str] = ()


def define_flags() -> None:
  """Defines the flags of this command."""
  weights_and_data.define_flags('.npz or .parquet')


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
  setting = data_flags.setting(
    weights, config, lambda _: source, mesh, request.batch_size
  )
  extractor = Extractor(setting, None, 'the extraction of features')
  with jax.set_mesh(mesh):
    params = weights.load(weights.abstract_params(mesh))
    about = {
      'checkpoint': weights.path,
      'weights': request.weights,
      'digest': frozen.digests({'': params})[''],
      **extraction.describe_data(config, source),
      'preprocess': preprocessing_flags.describe(weights, config),
      'batch_size': setting.batch_size,
    }
    done = existing_result(out, about, writing.about_of, ('count', 'width'))
    if not done:
      size = -(-request.part_examples // setting.batch_size)
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
    return config, image_files.Images(request.images)
  config, source, _ = weights_and_data.open_data(weights, request)
  return config, source


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
  request = Request.of_flags(images=arguments)
  result = run(weights_flags.path(values), values.out, request)
  weights_and_data.print_result(values.out, result, ('count', 'width'))


if __name__ == '__main__':
  process.run(main, define_flags)
