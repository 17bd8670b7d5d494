"""A source whose records show their index, and batches of it on the host."""

import collections

import cv2
import jax
import numpy as np

from vit_jax.arrays import sharding
from vit_jax.data.augment.transforms import EvalTransform, TrainTransform
from vit_jax.data.contract import Source
from vit_jax.data.pipeline import stream
from vit_jax.data.pipeline.workers import Reader
from vit_jax.evaluators.contract import Setting

PLAIN = EvalTransform((4, 4))
AUGMENT = TrainTransform((4, 4))


class Numbered(Source):
  """Images that show their index; some records can be damaged."""

  name = 'numbered/train'

  def __init__(self, size, *, bad_label=None, undecodable=None, missing=None):
    self.size = size
    self.num_classes = size
    self.class_names = [str(i) for i in range(size)]
    self.bad = dict(label=bad_label, undecodable=undecodable, missing=missing)
    self.read = collections.Counter()

  def __len__(self):
    return self.size

  def __getitem__(self, index):
    assert 0 <= index < self.size
    self.read[index] += 1
    if index == self.bad['missing']:
      raise OSError('the disk is gone')
    pixels = np.random.default_rng(index).integers(0, 256, (9, 11, 3))
    image = cv2.imencode('.png', pixels.astype(np.uint8))[1].tobytes()
    if index in np.atleast_1d(self.bad['undecodable']):
      image = image[: len(image) // 2]
    label = self.size if index == self.bad['label'] else index
    return {'image': image, 'label': label}


class Shown(Source):
  """Grey images whose value is their index; some may be bad."""

  def __init__(self, labels, class_names, bad=(), **columns):
    self.name, self.bad = f'shown/{len(labels)}', set(bad)
    self.num_classes, self.class_names = len(class_names), list(class_names)
    self.label_keys = ('label', *columns)
    self.given, self.columns = labels, columns

  def __len__(self):
    return len(self.given)

  def __getitem__(self, index):
    image = np.full((4, 4, 3), index, np.uint8)
    more = {name: values[index] for name, values in self.columns.items()}
    return {
      'image': b'broken' if index in self.bad else image,
      'label': int(self.given[index]),
    } | more


def row_of(params, batch):
  """Returns the rows of the parameters for images of `Shown`, as logits."""
  return {'logits': params[batch['image'][:, 0, 0, 0]]}


class Computed:
  """An objective whose results a function of weights and batch computes."""

  cross_entropy = 'softmax'

  def __init__(self, function, num_classes):
    self.function, self.num_classes = function, num_classes

  def predict(self, params, batch, want=()):
    return self.function(params, batch)


def eval_setting(
  source, predict=row_of, num_classes=0, batch_size=8, devices=1, **reader
):
  """Returns the setting of an evaluator whose only source is `source`."""
  return Setting(
    open_source=lambda split: source,
    transform=PLAIN,
    objective=Computed(predict, num_classes),
    mesh=mesh_of(data=devices),
    batch_size=batch_size,
    reader=Reader(threads=2, **reader),
  )


def mesh_of(data=1, fsdp=1, model=1):
  devices = jax.devices()[: data * fsdp * model]
  return sharding.make_mesh(devices, data=data, fsdp=fsdp, model=model)


def train(source, batch_size, steps, *, start=0, mesh=None, **settings):
  """Returns some training batches on the host: a list of {image, label}."""
  arguments = dict(transform=AUGMENT, seed=0) | settings
  with stream.train_batches(
    source,
    arguments.pop('transform'),
    batch_size,
    arguments.pop('seed'),
    start,
    mesh or mesh_of(data=8),
    **arguments,
  ) as batches:
    return [jax.device_get(next(batches)) for _ in range(steps)]


def assert_same(first, second):
  assert len(first) == len(second)
  for a, b in zip(first, second, strict=True):
    assert a.keys() == b.keys()
    for key in a:
      np.testing.assert_array_equal(a[key], b[key])
