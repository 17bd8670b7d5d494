"""Compares presets of preprocessing with the code of their projects.

  python -m benchmarks.preprocessing FOLDER [--size=224]

Prints a Markdown table for benchmarks/RESULTS.md: the differences between the
normalized pixels of the images below a folder in grey levels (of 255), once
with the pixels that Pillow decodes (`pixels`), and once with each project's own
decoder (`files`).
"""

import argparse
import io
import pathlib

import numpy as np
from PIL import Image

from benchmarks import peers
from vit_jax.data.augment import presets, transforms


def tensorflow_image(data):
  """Returns float32 pixels of a file or of pixels, as in TensorFlow."""
  import tensorflow as tf

  if isinstance(data, bytes):
    return tf.io.decode_image(data, channels=3, expand_animations=False)
  return tf.constant(data)


def vit(data, size):
  """Implements google-research/vision_transformer, input_pipeline.py."""
  import tensorflow as tf

  resized = tf.image.resize(tensorflow_image(data), [size, size])
  return np.asarray((resized - 127.5) / 127.5)


def big_vision(data, size):
  """Implements pp/ops_image.py: resize_small, central_crop, value_range."""
  import tensorflow as tf

  image = tensorflow_image(data)
  smaller = {224: 256, 384: 448}[size]
  y, x = tf.shape(image)[0], tf.shape(image)[1]
  factor = smaller / tf.cast(tf.minimum(y, x), tf.float32)
  y, x = (
    tf.cast(tf.round(tf.cast(side, tf.float32) * factor), tf.int32)
    for side in (y, x)
  )
  resized = tf.image.resize(image, (y, x), method='area')
  resized = tf.cast(tf.clip_by_value(resized, 0, 255), tf.uint8)
  crop = tf.image.crop_to_bounding_box(
    resized, (y - size) // 2, (x - size) // 2, size, size
  )
  return np.asarray(tf.cast(crop, tf.float32) / 127.5 - 1)


def pillow_image(data):
  """Returns the image that torchvision's and timm's transforms get."""
  if isinstance(data, bytes):
    return Image.open(io.BytesIO(data)).convert('RGB')
  return Image.fromarray(data)


def timm(data, size):
  """Applies timm.data.create_transform of a model with crop_pct .9."""
  transform = peers.import_timm().data.create_transform(
    size,
    interpolation='bicubic',
    crop_pct=0.9,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
  )
  return np.moveaxis(transform(pillow_image(data)).numpy(), 0, -1)


def _torchvision(data, resized, size):
  peers.import_timm()  # where torchvision was built for another torch
  from torchvision import transforms as lib

  transform = lib.Compose(
    [
      lib.Resize(resized, interpolation=lib.InterpolationMode.BICUBIC),
      lib.CenterCrop(size),
      lib.ToTensor(),
      lib.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    ]
  )
  return np.moveaxis(transform(pillow_image(data)).numpy(), 0, -1)


def dino(data, size):
  """Implements facebookresearch/dino, eval_knn.py; other sizes scaled."""
  return _torchvision(data, int(size * 256 / 224), size)


def mae(data, size):
  """Implements facebookresearch/mae, util/datasets.py, build_transform."""
  share = 224 / 256 if size <= 224 else 1.0
  return _torchvision(data, int(size / share), size)


ORIGINALS = {
  'vit': (vit, 'tf.image.resize, bilinear'),
  'big_vision': (big_vision, 'resize_small by area, central_crop'),
  'timm': (timm, 'timm.data.create_transform, crop_pct .9'),
  'dino': (dino, 'torchvision, bicubic 256, centre 224'),
  'mae': (mae, 'torchvision, bicubic 256, centre 224'),
}


def ours(name, data, size):
  """Returns normalized pixels by a preset of this package."""
  section = presets.section(name, (size, size))
  pixels = transforms.EvalTransform((size, size), **section).pixels(data)
  mean, std = map(np.float32, presets.PRESETS[name].normalization)
  return (np.float32(pixels) / 255 - mean) / std


def difference(name, data, size):
  """Returns the grey levels between a preset and its original per value."""
  std = np.float32(presets.PRESETS[name].normalization[1])
  theirs = ORIGINALS[name][0](data, size)
  return np.abs(ours(name, data, size) - theirs) * std * 255


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument('folder', type=pathlib.Path)
  parser.add_argument('--size', type=int, default=224)
  given = parser.parse_args()
  kinds = ('.jpg', '.jpeg', '.png')
  files = sorted(
    path for path in given.folder.rglob('*') if path.suffix.lower() in kinds
  )
  if not files:
    parser.error(f'no photographs in {given.folder}')
  print(f'{len(files)} images, {given.size} pixels; grey levels of 255')
  columns = 'mean | 99.9 % are below | largest | above 1, %'
  print(f'| preset | original | given | {columns} |')
  print('|---|---|---|---|---|---|---|')
  for name in presets.PRESETS:
    for kind in ('pixels', 'files'):
      counts, total, top = np.zeros(25_601, np.int64), 0.0, 0.0
      for path in files:
        data = path.read_bytes()
        if kind == 'pixels':
          data = np.array(pillow_image(data))
        found = difference(name, data, given.size)
        total, top = total + found.mean(), max(top, float(found.max()))
        counts += np.bincount(
          (found * 100).astype(int).ravel(), minlength=25_601
        )
      shares = np.cumsum(counts) / counts.sum()
      most = (np.searchsorted(shares, 0.999) + 1) / 100
      above = 100 * (1 - shares[100])
      row = f'{total / len(files):.3f} | {most:.2f} | {top:.2f} | {above:.3f}'
      original = ORIGINALS[name][1]
      print(f'| {name} | {original} | {kind} | {row} |', flush=True)


if __name__ == '__main__':
  main()
