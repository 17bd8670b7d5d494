"""Frozen features: python -m vit_jax.features --checkpoint=PATH … --out=F.npz.

Of a split, named as `evaluate` takes it: --dataset=NAME --split=S, --data_dir=D
and --config.source.KEY=…, or by a config: --config=configs/cifar10.py, whose
training split it is unless --split says otherwise; or of files: IMAGE…. The
output is an .npz or a .parquet file of features, labels and indices or paths;
class names and preprocessing stand beside. If it is interrupted, the same
command goes on where it stopped and gives the same file.
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
from vit_jax.cli.output_parts import finished
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
  """What features are wanted of: image files if there are any, or a split."""

  images: Sequence[str] = ()


def define_flags() -> None:
  """Defines the flags of this command."""
  weights_and_data.define_flags('.npz or .parquet')


def run(checkpoint: str, out_path: str, request: Request) -> dict[str, Any]:
  """Computes features and writes them.

  Args:
    checkpoint: workdir, step directory or weights of any format.
    out_path: path of the file, local.
    request: the rest.

  Returns:
    What the file says of itself: checkpoint, data, count, width, preprocess, ….

  Raises:
    UserError: no such checkpoint or data, a bad record, or a file that is there
      and of something else.
  """
  if paths.is_remote(out_path):
    raise UserError(f'--out={out_path} must be a local file.')
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
      **extraction.described(config, source),
      'preprocess': preprocessing_flags.described(weights, config),
      'batch_size': setting.batch_size,
    }
    done = finished(out, about, writing.about_of, ('count', 'width'))
    if not done:
      size = -(-request.part_examples // setting.batch_size)
      done = extraction.extract(extractor, params, source, out, about, size)
  return done


def _data(
  weights: pretrained.Pretrained, request: Request
) -> tuple[Config, Source]:
  """Opens the files or the split; returns the completed sections and the data.

  Raises:
    UserError: there is no such data or split, or it is empty.
  """
  if request.images:
    sections = weights_and_data.sections(weights)
    config = overrides.apply(sections, [*request.settings])
    return config, image_files.Images(request.images)
  config, source, _ = weights_and_data.open_data(weights, request)
  return config, source


def main(arguments: list[str]) -> None:
  """Writes the file and says what is in it."""
  values = flags.FLAGS
  named = values.dataset or values.config or values.split or values.data_dir
  if not values.checkpoint or not values.out or (arguments and named):
    raise UserError(
      'usage: python -m vit_jax.features --checkpoint=PATH --out=F.npz, and '
      '--dataset=NAME --split=S, or --config=FILE.py, or IMAGE…; got '
      f'checkpoint {values.checkpoint!r}, out {values.out!r}, '
      f'{len(arguments)} image(s), data {named!r}.'
    )
  process.start_process()
  request = Request.of_flags(images=arguments)
  result = run(weights_flags.path(values), values.out, request)
  weights_and_data.tell(values.out, result, ('count', 'width'))


if __name__ == '__main__':
  process.run(main, define_flags)
