"""A teacher's labels: python -m vit_jax.pseudo_label --checkpoint=P --out=FILE.

Of a split, named as `evaluate` takes it: --dataset=NAME --split=S, --data_dir=D
and --config.source.KEY=…, or by a config: --config=configs/cifar10.py. Labels
that the data has are not looked at. Images are preprocessed as the teacher's
weights say. The file is read by the source `pseudo_labels`, and an ordinary
config trains on it: configs/noisy_student.py. If it is interrupted, the same
command goes on where it stopped and writes the same file.

Reference: "Self-training with Noisy Student improves ImageNet classification",
Xie et al., arXiv 1911.04252.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from absl import flags

from vit_jax.arrays import sharding
from vit_jax.cli import process, weights_and_data
from vit_jax.config.completion import MAX_BATCH_SIZE
from vit_jax.data import fingerprint
from vit_jax.data.contract import Source
from vit_jax.data.sources.pseudo_labels import about_of
from vit_jax.errors import UserError, check_range
from vit_jax.files import paths
from vit_jax.pseudo_label import labelling
from vit_jax.run import runtime
from vit_jax.run.parts import finished
from vit_jax.training import frozen
from vit_jax.weights import data, preprocessing, pretrained


class Request(NamedTuple):
  """What is to be labelled, and what of it kept.

  Attributes:
    config: a config file whose data it is.
    dataset: TFDS name, or a source; by default the checkpoint's.
    split: of the data.
    data_dir: the TFDS directory, or the path of another source.
    weights: '' for the parameters, 'ema' or another name of `convert`.
    preprocess: a preset; by default the preprocessing of the weights.
    batch_size: images at once, on all devices.
    part_examples: written at once; rounded up to whole batches.
    settings: '--config.source.KEY=value', reader and preprocess likewise.
    min_confidence: of the most likely class, in [0, 1]; the paper's is .3.
    per_class: examples of each class; 0 for no balance. The paper's is 130,000.
    seed: of the images that have one copy more than others.
  """

  config: str | None = None
  dataset: str | None = None
  split: str | None = None
  data_dir: str | None = None
  weights: str = 'params'
  preprocess: str | None = None
  batch_size: int = 128
  part_examples: int = 8192
  settings: Sequence[str] = ()
  min_confidence: float = 0.3
  per_class: int = 0
  seed: int = 0


def define_flags() -> None:
  """The flags of this command."""
  weights_and_data.define_flags()
  flags.DEFINE_string('out', None, 'File to be written: .npz.')
  flags.DEFINE_float(
    'min_confidence', 0.3, 'Least probability of the most likely class.'
  )
  flags.DEFINE_integer(
    'per_class', 0, 'Examples of each class, copies among them; 0: no balance.'
  )
  flags.DEFINE_integer('seed', 0, 'Of the images that are copied once more.')
  process.define_distributed_flags()


def run(checkpoint: str, out_path: str, request: Request) -> dict[str, Any]:
  """Labels images and writes the file.

  Args:
    checkpoint: the teacher: workdir, step directory or weights of any format.
    out_path: of the file, local.
    request: the rest.

  Returns:
    What the file says of itself: checkpoint, data, seen, confident, count, ….

  Raises:
    UserError: no such checkpoint or data, a teacher without a head, a bad
      record, or a file that is there and of something else.
  """
  for key in ('batch_size', 'part_examples'):
    check_range(
      f'--{key}', getattr(request, key), at_least=1, at_most=MAX_BATCH_SIZE
    )
  check_range('--min_confidence', request.min_confidence, at_least=0, at_most=1)
  check_range('--per_class', request.per_class, at_least=0)
  check_range('--seed', request.seed, at_least=0)
  if paths.is_remote(out_path) or not out_path.endswith('.npz'):
    raise UserError(f'--out={out_path} must be a local file that ends in .npz.')
  out = paths.locate(out_path)
  weights = preprocessing.by_preset(
    pretrained.find(checkpoint), request.preprocess
  )
  asked = ('config', 'dataset', 'split', 'data_dir')
  config, source, split = weights_and_data.open_data(
    weights,
    **{key: getattr(request, key) for key in asked},
    settings=[*request.settings],
  )
  mesh = sharding.make_mesh(jax.devices())
  setting = data.setting(
    weights, config, lambda _: source, mesh, request.batch_size
  )
  with jax.set_mesh(mesh):
    params = weights_and_data.open_params(weights, request.weights, mesh)
    about = {
      'digest': frozen.digests({'': params})[''],
      'data': source.name,
      'examples': len(source),
      'source': config.source.to_dict(),
      'split': split,
      'fingerprint': fingerprint.of(source),
      'on_bad_record': config.reader.on_bad_record,
      'preprocess': preprocessing.described(weights, config),
      'batch_size': setting.batch_size,
      **_described(weights, source, request),
    }
    done = finished(out, about, about_of, labelling.OF_CHOICE)
    if not done:
      size = -(-request.part_examples // setting.batch_size)
      done = labelling.label(setting, params, source, out, about, size)
  return done


def _described(
  weights: pretrained.Pretrained, source: Source, request: Request
) -> dict[str, Any]:
  """Whose labels they are, and what is kept of them."""
  keys = ('weights', 'min_confidence', 'per_class', 'seed')
  return {
    'checkpoint': weights.path,
    'class_names': _class_names(weights, source),
    **{key: getattr(request, key) for key in keys},
  }


def _class_names(weights: pretrained.Pretrained, source: Source) -> list[str]:
  """Those of the teacher; of weights without names, the data's or numbers.

  Raises:
    UserError: the teacher has no head.
  """
  outputs = weights.about['num_classes']
  if not outputs:
    raise UserError(
      f'{weights.path} has no head, and so no opinion of classes: take a '
      'teacher that was trained or fine-tuned with labels.'
    )
  for names in (weights.about.get('class_names') or (), source.class_names):
    if len(names) == outputs:
      return list(names)
  return [str(number) for number in range(outputs)]


def main(arguments: list[str]) -> None:
  """Writes the file and says what is in it."""
  values = flags.FLAGS
  if not values.checkpoint or not values.out or arguments:
    raise UserError(
      'usage: python -m vit_jax.pseudo_label --checkpoint=PATH --out=F.npz, '
      'and --dataset=NAME --split=S, or --config=FILE.py; got checkpoint '
      f'{values.checkpoint!r}, out {values.out!r}, {len(arguments)} other '
      'argument(s).'
    )
  process.start_process()
  taken: dict[str, Any] = {
    key: getattr(values, key) for key in Request._fields if key in values
  }
  request = Request(**taken | {'settings': values.overrides})
  result = run(values.checkpoint, values.out, request)
  if not runtime.is_main():
    return
  result = {'out': values.out, **result, 'classes': len(result['class_names'])}
  del result['class_names']
  if values.json:
    print(json.dumps(result))
    return
  shown = ('out', 'checkpoint', 'data', 'seen', 'confident', 'distinct')
  for key in (*shown, 'count', 'classes'):
    print(f'{key}: {result[key]}')
  print(f'preprocess: {preprocessing.line(result["preprocess"])}')
