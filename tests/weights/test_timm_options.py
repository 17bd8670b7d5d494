"""Tests of options of the ViT in timm's files."""

import numpy as np
import pytest
import references
import safetensors.numpy
from references import HEADS, timm_file, timm_vit, torch

from vit_jax import load_pretrained
from vit_jax.weights import pretrained
from vit_jax.weights.formats.normalization import CLIP

HEADLESS = dict(num_classes=0)
GAP = dict(class_token=False, global_pool='avg', fc_norm=False)
OPTIONS = {
  'distilled': ('deit_base_distilled_patch16_224', {}),
  'distilled, headless': ('deit_base_distilled_patch16_224', HEADLESS),
  'DeiT-III': ('deit3_base_patch16_224', {}),
  'registers': ('vit_small_patch14_reg4_dinov2', {}),
  'registers with positions': (
    'vit_base_patch16_224',
    dict(reg_tokens=2, no_embed_class=False),
  ),
  'registers, gap': ('vit_base_patch16_224', GAP | dict(reg_tokens=2)),
  'qk norm': ('vit_base_patch16_224', dict(qk_norm=True)),
  'gated': ('vit_giant_patch14_dinov2', dict(depth=2)),
  'CLIP': ('vit_base_patch16_clip_224', {}),
  'the first CLIP': ('vit_base_patch16_clip_quickgelu_224', {}),
}


@pytest.mark.slow
@pytest.mark.parametrize('kind', OPTIONS)
def test_options_equal_timm_both_ways(tmp_path, kind):
  """Weights are read from timm and written back."""
  name, changes = OPTIONS[kind]
  reference = timm_vit(name, **changes)
  config = dict(
    architecture=name,
    model_args={'num_heads': HEADS},
    pretrained_cfg=dict(mean=(0.5,) * 3, std=(0.5,) * 3),
  )
  path = timm_file(tmp_path, reference, config)
  model, params = load_pretrained(path)
  references.agree(model, params, reference)
  back = str(tmp_path / 'back.safetensors')
  pretrained.save(back, params, pretrained.find(path).about)
  tensors = safetensors.numpy.load_file(back)
  state = {k: torch.from_numpy(v) for k, v in tensors.items()}
  timm_vit(name, **changes).load_state_dict(state, strict=True)
  for name, array in references.state(reference).items():
    np.testing.assert_array_equal(tensors[name], array)


def test_clip_without_a_config(tmp_path):
  """Its statistics are those of the family, and are folded into the bias."""
  reference = timm_vit('vit_base_patch16_clip_quickgelu_224')
  name = 'vit_clip_quickgelu.safetensors'
  path = timm_file(tmp_path, reference, name=name)
  model, params = load_pretrained(path, num_heads=HEADS)
  assert model.gelu == 'quick' and model.pre_norm
  mean, std = CLIP
  references.agree(model, params, reference, mean=mean, std=std)
  back = str(tmp_path / 'back.safetensors')
  about = pretrained.find(path).changed(num_heads=HEADS).about
  pretrained.save(back, params, about)
  written = safetensors.numpy.load_file(back)
  assert written.keys() == references.state(reference).keys()


def test_npz_logs_what_it_cannot_store(tmp_path, caplog):
  """GELU and ε other than the official ones are logged."""
  reference = timm_vit()
  path = timm_file(tmp_path, reference)
  _, params = load_pretrained(path, num_heads=HEADS)
  about = pretrained.find(path).changed(num_heads=HEADS).about
  for form in ('', 'big_vision:'):
    caplog.clear()
    pretrained.save(f'{form}{tmp_path}/a.npz', params, about)
    assert "gelu='exact' (and not 'tanh')" in caplog.text
    model, again = load_pretrained(f'{form}{tmp_path}/a.npz', gelu='exact')
    references.agree(model, again, reference)
    caplog.clear()
    plain = about | {'model': about['model'] | {'gelu': 'tanh'}}
    pretrained.save(f'{form}{tmp_path}/a.npz', params, plain)
    assert 'gelu=' not in caplog.text
