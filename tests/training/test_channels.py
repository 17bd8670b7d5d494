"""A run on images of five channels with 16 bits, up to predictions."""

import shutil

import numpy as np
import pytest
import tifffile
from etils import epath
from minimal_config import completed

from tests import cli
from vit_jax import evaluate, predict, preview
from vit_jax.features import Images
from vit_jax.training import loop
from vit_jax.weights import pretrained

CHANGES = {
  'num_classes': 2,
  'batch_size': 8,
  'train.num_examples': 16,
  'total': '6 steps',
  'checkpoint.every': '3 steps',
  'log': {'every': '3 steps'},
  'log.tensorboard': False,
  'log.curves': False,
  'model.channels': 5,
  'model.mean': (0.01, 0.01, 0.01, 0.03, 0.01),
  'model.std': (0.005,) * 5,
  'evals': {'val': {'name': 'classification', 'split': 'val'}},
} | {
  f'{section}.{key}': value
  for section in ('augment', 'preprocess')
  for key, value in (('channels', 5), ('bits', 16))
}


@pytest.fixture(scope='module')
def images(tmp_path_factory):
  """Creates images whose class is visible only in the fourth channel."""
  root = tmp_path_factory.mktemp('images')
  rng = np.random.default_rng(0)
  for split, count in (('train', 8), ('val', 4)):
    for label, name in enumerate(('field', 'water')):
      (root / split / name).mkdir(parents=True)
      for i in range(count):
        pixels = rng.integers(0, 1000, (10, 12, 5)) + 300
        pixels[..., 3] += 3000 * (1 - label)
        tifffile.imwrite(
          root / split / name / f'{i}.tif',
          pixels.astype(np.uint16),
          photometric='minisblack',
          planarconfig='contig',
        )
  return root


@pytest.mark.slow
@pytest.mark.long
def test_a_run_on_five_channels(images, tmp_path):
  """A resumed run repeats its losses; the commands read the same images."""
  config = completed(source={'name': 'folder', 'path': str(images)}, **CHANGES)
  workdir = epath.Path(tmp_path) / 'run'
  loop.run(config, workdir)
  first = cli.losses(workdir)
  assert {*first} == {3, 6} and (workdir / 'report.json').exists()
  shutil.rmtree(workdir / 'checkpoints/6')
  loop.run(config, workdir)
  assert cli.losses(workdir) == first
  result = evaluate.run(str(workdir), evaluate.Request(batch_size=8))
  assert result['count'] == 8 and result['preprocess']['bits'] == 16
  assert result['preprocess']['mean'] == [*CHANGES['model.mean']]
  paths = sorted(map(str, (images / 'val').rglob('*.tif')))
  found = [
    each.top[0][0]
    for each in predict.run(str(workdir), paths, predict.Request())
  ]
  right = np.mean(
    [name in path for name, path in zip(found, paths, strict=True)]
  )
  assert right == result['accuracy']
  assert len(preview.run(config, 4, 0)) == 4
  loaded = pretrained.load_pretrained(str(workdir))
  pixels = loaded.preprocess(Images(paths)[0]['image'])
  logits = loaded.model.apply({'params': loaded.params}, pixels[None])
  assert loaded.class_names[logits[0].argmax()] == found[0]
