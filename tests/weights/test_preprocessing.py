"""Tests of weights evaluated with the preset of another family."""

import jax
from references import HEADS, SIZE, same_results, timm_file, timm_vit

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
    statistics = presets.PRESETS[name or 'timm'].normalization
    same_results((source.model(), params), reference, (SIZE, SIZE), statistics)
  del source.about['normalization']
  ours = pretrained.Pretrained('ours', source.about, found.load)
  kept = shared_flags.with_preset(ours, 'dino')
  assert kept.load is found.load and 'resizing' in caplog.text
  assert kept.about['preprocess']['resize'] == 'torchvision'
  for weights in (found, kept):
    config = overrides.apply(
      {'preprocess': {'name': 'transforms', **weights.about['preprocess']}},
      ['--config.preprocess.interpolation=area'],
    )
    description = shared_flags.describe(weights, config)
    assert description['mean'] == [0.5] * 3
    assert description['resize'] == 'torchvision'
    assert 'interpolation=area' in shared_flags.line(description)
