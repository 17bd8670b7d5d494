"""Pseudo-labels: python -m vit_jax.pseudo_label --checkpoint=PATH --out=F.npz.

A teacher predicts the labels of a split. The split is given with the flags of
`evaluate`: --dataset=NAME --split=S, --data_dir=D and --config.source.KEY=…, or
by a config: --config=configs/cifar10.py. Labels of the data are not used.
Images are preprocessed as for the teacher. The source `pseudo_labels` reads the
file, so that any config can train on it, for example configs/noisy_student.py.
After an interruption, the same command continues and writes the same file.

Reference: "Self-training with Noisy Student improves ImageNet classification",
Xie et al., arXiv 1911.04252.
"""

import dataclasses
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
from vit_jax.cli.output_parts import batch_size, existing_result
from vit_jax.data import fingerprint
from vit_jax.data.contract import Source
from vit_jax.data.sources.pseudo_labels import about_of
from vit_jax.errors import UserError, check_range
from vit_jax.files import paths
from vit_jax.pseudo_label import labelling
from vit_jax.training import frozen
from vit_jax.weights import pretrained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request(weights_and_data.Request):
  """Data to be labelled, and settings of the selection of examples.

  Attributes:
    min_confidence: minimum probability of the most likely class for an image to
      be selected, in [0, 1]; .3 in the paper.
    per_class: number of examples of each class, including copies; 130,000 in
      the paper; 0 for no balancing.
    seed: seed of the random choice of images that get an additional copy.
  """

  min_confidence: float = 0.3
  per_class: int = 0
  seed: int = 0

  def __post_init__(self):
    super().__post_init__()
    check_range('--min_confidence', self.min_confidence, at_least=0, at_most=1)
    check_range('--per_class', self.per_class, at_least=0)
    check_range('--seed', self.seed, at_least=0)


def define_flags() -> None:
  """Defines the flags of this command."""
  weights_and_data.define_flags('.npz')
  flags.DEFINE_float(
    'min_confidence', 0.3, 'Smallest probability of the most likely class.'
  )
  flags.DEFINE_integer(
    'per_class',
    0,
    'Number of examples of each class, including copies; 0 for no balancing.',
  )
  flags.DEFINE_integer(
    'seed',
    0,
    'Seed of the random choice of images that get an additional copy.',
  )


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
  if paths.is_remote(out_path) or not out_path.endswith('.npz'):
    raise UserError(
      f'--out={out_path} is not allowed: give the path of a local .npz file.'
    )
  out = paths.locate(out_path)
  weights = weights_and_data.open_weights(checkpoint, request)
  opened = weights_and_data.open_data(weights, request)
  config, source, split, left_out = opened
  mesh = sharding.make_mesh(jax.devices())
  rows = request.batch_size or batch_size(out)
  rows = rows or batches.fitting(weights, mesh, examples=len(source))
  setting = data_flags.setting(weights, config, lambda _: source, mesh, rows)
  with jax.set_mesh(mesh):
    params = weights.load(weights.abstract_params(mesh))
    about = {
      'digest': frozen.digests({'': params})[''],
      'data': source.name,
      'examples': len(source),
      'source': config.source.to_dict(),
      'split': split,
      'fingerprint': fingerprint.of(source),
      'on_bad_record': config.reader.on_bad_record,
      'preprocess': preprocessing_flags.describe(weights, config),
      'batch_size': setting.batch_size,
      **_describe(weights, source, request),
    }
    if len(left_out):  # files without this key remain valid
      about['left_out'] = fingerprint.checksum(left_out)
    done = existing_result(out, about, about_of, labelling.RESULTS)
    if not done:
      size = -(-request.part_examples // setting.batch_size)
      done = labelling.label(
        setting, params, source, out, about, size, left_out
      )
  return done


def _describe(
  weights: pretrained.Pretrained, source: Source, request: Request
) -> dict[str, Any]:
  """Returns a description of the teacher and the settings of the selection."""
  keys = ('weights', 'min_confidence', 'per_class', 'seed')
  return {
    'checkpoint': weights.path,
    'class_names': _class_names(weights, source),
    **{key: getattr(request, key) for key in keys},
  }


def _class_names(weights: pretrained.Pretrained, source: Source) -> list[str]:
  """Returns the names of the teacher's classes.

  They are the names that are stored with the teacher, or else the names of the
  data if their number is the same, or else numbers.

  Raises:
    UserError: the teacher does not have a head.
  """
  outputs = weights.about['num_classes']
  if not outputs:
    raise UserError(
      f'the model in {weights.path} does not have a head and cannot predict '
      'classes: use a teacher that was trained or fine-tuned with labels.'
    )
  for names in (weights.about.get('class_names') or (), source.class_names):
    if len(names) == outputs:
      return list(names)
  return [str(number) for number in range(outputs)]


def main(arguments: list[str]) -> None:
  """Writes the file and prints a summary of its content."""
  values = flags.FLAGS
  if not values.checkpoint or not values.out or arguments:
    raise UserError(
      'usage: python -m vit_jax.pseudo_label --checkpoint=PATH --out=F.npz '
      'with either --dataset=NAME --split=S or --config=FILE.py; got '
      f'--checkpoint={values.checkpoint}, --out={values.out} and '
      f'{len(arguments)} other argument(s).'
    )
  process.start_process()
  result = run(weights_flags.path(values), values.out, Request.of_flags())
  keys = ('seen', 'confident', 'distinct', 'count')
  weights_and_data.print_result(values.out, result, keys)


if __name__ == '__main__':
  process.run(main, define_flags)
