"""Measures images per second of the input pipeline, tf.data and PyTorch.

  python benchmarks/input.py --images=DIR [--records=5000] [--rounds=3]

DIR contains photographs as class/name.jpg. They are repeated to `--records` and
written as a folder, as array_record and as tfrecord; with --side=N, they are
first resized to a longer side of N pixels. Each round measures every reader
once, in turn, over the same number of images: read, decode, inception crop to
224 px, flip, batch. Ours is the stream that the trainer gets, including batches
on the device; "vit_jax-scaled" decodes with `augment.scaled_decoding`. The
Markdown table for benchmarks/RESULTS.md contains medians, and ratios to tf.data
(fused decode_and_crop) in the same run; peak memory is that of the reader's
process.
"""

import argparse
import functools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

SIZE = 224
READERS = (
  'vit_jax folder',
  'vit_jax-scaled folder',
  'vit_jax array_record',
  'vit_jax tfrecord',
  'tf.data folder',
  'tf.data tfrecord',
  'torch+PIL folder',
)


def make_data(
  images: pathlib.Path,
  records: int,
  out: pathlib.Path,
  side: int | None,
  copies: set[str],
) -> None:
  """Writes the copies of the data that the readers need."""
  files = sorted(p for p in images.rglob('*') if p.is_file())
  if not files:
    sys.exit(f'no photographs in {images}')
  classes = sorted({p.parent.name for p in files})
  for i in range(records):
    file = files[i % len(files)]
    target = out / 'folder' / file.parent.name / f'{i:06d}.jpg'
    target.parent.mkdir(parents=True, exist_ok=True)
    first = target.with_name(f'{i % len(files):06d}.jpg')
    if first.exists():
      target.write_bytes(first.read_bytes())
    else:
      target.write_bytes(resized(file, side) if side else file.read_bytes())
  if copies == {'folder'}:
    return
  import tensorflow_datasets as tfds

  class Photos(tfds.core.GeneratorBasedBuilder):
    """Photographs."""

    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
      return tfds.core.DatasetInfo(
        builder=self,
        features=tfds.features.FeaturesDict(
          {
            'image': tfds.features.Image(encoding_format='jpeg'),
            'label': tfds.features.ClassLabel(names=classes),
          }
        ),
      )

    def _split_generators(self, dl_manager):
      del dl_manager
      return {'train': self._generate_examples()}

    def _generate_examples(self):
      for path in sorted((out / 'folder').rglob('*.jpg')):
        yield path.stem, {'image': str(path), 'label': path.parent.name}

  for file_format in copies - {'folder'}:
    builder = Photos(data_dir=str(out / file_format), file_format=file_format)
    builder.download_and_prepare()


def resized(file: pathlib.Path, side: int) -> bytes:
  """Returns a JPEG of quality 95 of a photograph with this longer side."""
  import cv2

  pixels = cv2.imread(str(file))
  scale = side / max(pixels.shape)
  method = cv2.INTER_LANCZOS4 if scale > 1 else cv2.INTER_AREA
  pixels = cv2.resize(pixels, None, fx=scale, fy=scale, interpolation=method)
  return cv2.imencode('.jpg', pixels)[1].tobytes()


def ours(
  data: pathlib.Path, images: int, batch: int, scaled: bool = False, **reader
) -> float:
  """Measures `stream.train_batches`, in images/s."""
  import jax

  from vit_jax.arrays import sharding
  from vit_jax.data.augment.transforms import TrainTransform
  from vit_jax.data.pipeline import stream
  from vit_jax.data.sources import folder, tfds

  if data.name == 'folder':
    source = folder.Source('train', path=str(data))
  else:
    source = tfds.Source('train', dataset='photos', data_dir=str(data))
  mesh = sharding.make_mesh(jax.devices()[:1])
  transform = TrainTransform((SIZE, SIZE), scaled_decoding=scaled)
  with stream.train_batches(
    source, transform, batch, 0, 0, mesh, reader=stream.Reader(**reader)
  ) as batches:
    return _rate(
      lambda: next(batches)['image'].block_until_ready(), images, batch
    )


def tf_data(data: pathlib.Path, images: int, batch: int, threads: int) -> float:
  """Measures tf.data with fused decode_and_crop, in images/s."""
  import tensorflow as tf

  tf.config.set_visible_devices([], 'GPU')

  def crop(encoded):
    shape = tf.image.extract_jpeg_shape(encoded)
    begin, size, _ = tf.image.sample_distorted_bounding_box(
      shape,
      tf.zeros([0, 0, 4], tf.float32),
      area_range=(0.05, 1.0),
      min_object_covered=0,
      use_image_if_no_bounding_boxes=True,
    )
    window = tf.stack([begin[0], begin[1], size[0], size[1]])
    image = tf.image.decode_and_crop_jpeg(encoded, window, channels=3)
    image = tf.image.resize(image, [SIZE, SIZE])
    return tf.cast(tf.image.random_flip_left_right(image), tf.uint8)

  if data.name == 'folder':
    files = sorted(str(p) for p in data.rglob('*.jpg'))
    dataset = tf.data.Dataset.from_tensor_slices(files)
    dataset = dataset.shuffle(len(files)).repeat()
    dataset = dataset.map(
      lambda path: crop(tf.io.read_file(path)), num_parallel_calls=threads
    )
  else:
    shards = sorted(str(p) for p in data.rglob('*.tfrecord*'))
    feature = {'image': tf.io.FixedLenFeature([], tf.string)}
    dataset = tf.data.TFRecordDataset(shards).repeat().shuffle(1000)
    dataset = dataset.map(
      lambda r: crop(tf.io.parse_single_example(r, feature)['image']),
      num_parallel_calls=threads,
    )
  options = tf.data.Options()
  options.deterministic = False
  options.threading.private_threadpool_size = threads
  iterator = iter(dataset.batch(batch).prefetch(2).with_options(options))
  return _rate(lambda: next(iterator).numpy(), images, batch)


def torch_pil(
  data: pathlib.Path, images: int, batch: int, threads: int
) -> float:
  """Measures PyTorch's DataLoader with PIL in processes, in images/s."""
  import numpy as np
  import torch
  from PIL import Image

  class Photos(torch.utils.data.Dataset):
    def __init__(self):
      self.files = sorted(data.rglob('*.jpg'))

    def __len__(self):
      return len(self.files)

    def __getitem__(self, index):
      rng = np.random.default_rng()
      with Image.open(self.files[index]) as opened:
        image = opened.convert('RGB')
      width, height = image.size
      area = rng.uniform(0.05, 1) * width * height
      aspect = np.exp(rng.uniform(np.log(3 / 4), np.log(4 / 3)))
      w = min(width, max(1, round((area * aspect) ** 0.5)))
      h = min(height, max(1, round((area / aspect) ** 0.5)))
      x, y = rng.integers(width - w + 1), rng.integers(height - h + 1)
      image = image.resize(
        (SIZE, SIZE), Image.Resampling.BILINEAR, box=(x, y, x + w, y + h)
      )
      pixels = np.asarray(image)
      return torch.from_numpy(pixels[:, :: rng.choice([-1, 1])].copy())

  loader = torch.utils.data.DataLoader(
    Photos(), batch, shuffle=True, num_workers=threads, drop_last=True
  )

  def endless():
    while True:
      yield from loader

  iterator = endless()
  return _rate(lambda: next(iterator), images, batch)


def _rate(take, images: int, batch: int) -> float:
  """Returns images/s after two warm-up batches."""
  for _ in range(2):
    take()
  steps = max(images // batch, 1)
  start = time.perf_counter()
  for _ in range(steps):
    take()
  return steps * batch / (time.perf_counter() - start)


def one(
  name: str,
  data: pathlib.Path,
  images: int,
  batch: int,
  threads: int,
  processes: int,
) -> None:
  """Measures one reader in this process; prints rate and peak memory."""
  kind, _, copy = name.partition(' ')
  measure = {
    'vit_jax': functools.partial(ours, threads=threads, processes=processes),
    'vit_jax-scaled': functools.partial(
      ours, scaled=True, threads=threads, processes=processes
    ),
    'tf.data': functools.partial(tf_data, threads=threads),
    'torch+PIL': functools.partial(torch_pil, threads=threads),
  }[kind]
  rate = measure(data / copy, images, batch)
  # getrusage would start with the peak of the parent process.
  status = pathlib.Path('/proc/self/status').read_text()
  peak = int(status.partition('VmHWM:')[2].split()[0]) / 1024
  print(f'RESULT {rate:.1f} {peak:.0f}')


def main() -> None:
  """Runs every reader in its own process, in turn."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--images', type=pathlib.Path)
  parser.add_argument(
    '--data', type=pathlib.Path, help='made by an earlier run'
  )
  parser.add_argument('--records', type=int, default=5000)
  parser.add_argument('--side', type=int, help='longer side, pixels')
  parser.add_argument('--measured', type=int, default=5000)
  parser.add_argument('--batch', type=int, default=128)
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--threads', type=int, default=os.cpu_count())
  parser.add_argument('--processes', type=int, default=0)
  parser.add_argument('--readers', default=','.join(READERS))
  parser.add_argument('--one', help='measure one reader (internal)')
  args = parser.parse_args()
  if args.one:
    one(
      args.one,
      args.data,
      args.measured,
      args.batch,
      args.threads,
      args.processes,
    )
    return
  with tempfile.TemporaryDirectory() as temporary:
    data = args.data or pathlib.Path(temporary)
    if not (data / 'folder').exists():
      copies = {name.partition(' ')[2] for name in args.readers.split(',')}
      make_data(args.images, args.records, data, args.side, copies)
    results: dict[str, list[tuple[float, float]]] = {}
    for number in range(args.rounds):
      for name in args.readers.split(','):
        command = [sys.executable, __file__, '--one', name, '--data', str(data)]
        for key in ('measured', 'batch', 'threads', 'processes'):
          command += [f'--{key}', str(getattr(args, key))]
        environment = os.environ | {
          'JAX_PLATFORMS': 'cpu',
          'TF_CPP_MIN_LOG_LEVEL': '3',
        }
        output = subprocess.run(
          command, env=environment, capture_output=True, text=True
        )
        if 'RESULT' not in output.stdout:
          sys.exit(f'{name} failed:\n{output.stderr[-3000:]}')
        rate, peak = map(float, output.stdout.rpartition('RESULT ')[2].split())
        results.setdefault(name, []).append((rate, peak))
        print(f'round {number + 1}: {name}: {rate:,.0f} img/s', flush=True)
  print(
    f'\n{args.threads} threads, {args.processes} processes, medians of '
    f'{args.rounds} rounds of {args.measured} images'
  )
  print(
    '| reader | img/s | ratio to tf.data | peak RSS, MiB |\n|---|---|---|---|'
  )
  medians = {n: statistics.median(r for r, _ in v) for n, v in results.items()}
  for name, values in results.items():
    copy = name.partition(' ')[2].replace('array_record', 'tfrecord')
    base = medians.get(f'tf.data {copy}')
    ratio = f'{medians[name] / base:.2f}' if base else ''
    peak = max(p for _, p in values)
    print(f'| {name} | {medians[name]:,.0f} | {ratio} | {peak:,.0f} |')


if __name__ == '__main__':
  main()
