"""Tests of weights evaluated with the preset of another family."""

import jax
import numpy as np
import references
from references import HEADS, timm_file, timm_vit

from vit_jax.arrays import sharding
from vit_jax.cli import shared_flags
from vit_jax.config import overrides
from vit_jax.data.augment import presets
from vit_jax.weights import pretrained


def test_preset_sets_mean_and_standard_deviation(tmp_path, caplog):
  """Logits equal timm's for pixels normalized that way."""
  reference = timm_vit()
  path = timm_file(
    tmp_path,
    reference,
    dict(architecture='vit_base_patch16_224', model_args={'num_heads': HEADS}),
  )
  found = pretrained.find(path)
  mesh = sharding.make_mesh(jax.devices()[:1])
  for name in (None, 'timm', 'mae'):
    source = shared_flags.with_preset(found, name)
    params = source.load(source.abstract_params(mesh))
    mean, std = presets.PRESETS[name or 'timm'].normalization
    statistics = dict(mean=mean, std=std)
    references.agree(source.model(), params, reference, **statistics)
  description = shared_flags.describe(
    source,
    overrides.apply(
      {'preprocess': {'name': 'transforms', **source.about['preprocess']}},
      ['--config.preprocess.interpolation=area'],
    ),
  )
  assert description['mean'] == [0.485, 0.456, 0.406] and description[
    'resize'
  ] == ('torchvision')
  line = shared_flags.line(description)
  assert 'interpolation=area' in line and 'std=0.229,0.224,0.225' in line
  ours = source.about.copy()
  del ours['normalization']
  kept = shared_flags.with_preset(
    pretrained.Pretrained('ours', ours, found.load), 'dino'
  )
  assert kept.load is found.load and 'resizing' in caplog.text
  assert kept.about['preprocess']['resize'] == 'torchvision'
  assert (
    shared_flags.describe(
      kept, overrides.apply({'preprocess': {'name': 'transforms'}}, [])
    )['mean']
    == [0.5] * 3
  )
  np.testing.assert_equal(found.about['normalization']['mean'], [0.5] * 3)
