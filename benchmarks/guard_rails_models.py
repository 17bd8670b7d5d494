"""Small models for guard_rails.py: sections of configs, and foreign weights."""

import contextlib
import importlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

SIZES: dict[str, Any] = dict(
  patch_size=4, width=16, depth=2, mlp_dim=24, num_heads=2, dtype='float32'
)
STEM = dict(name='resnet', depths=(1,), width_factor=1)
VITS: list[dict[str, Any]] = [
  {},
  dict(pool='gap'),
  dict(pool='map'),
  dict(pre_logits=True, dropout=0.1),
  dict(registers=2, layer_scale=1e-4, gated=True),
  dict(distilled=True),
  dict(fc_norm=True),
  dict(qk_norm=True, pre_norm=True),
  dict(drop_path=0.2),
  dict(position='2d'),
  dict(position='relative'),
  dict(position='relative', position_at='shared'),
  dict(position='sincos2d'),
  dict(position='sincos2d_mae'),
  dict(position='rope2d', registers=1),
  dict(position='none'),
  dict(position_at='layers'),
  dict(position='2d', position_at='layers'),
  dict(position_at='shared'),
  dict(prefix_positions=False),
  dict(start_values='mae'),
  dict(start_values='trunc_normal'),
  dict(dtype='bfloat16', unroll=2, gelu='exact'),
  dict(pixels='imagenet', remat='dots', head_bias=-10.0),
]
OTHERS: list[dict[str, Any]] = [
  dict(name='vit', **SIZES | dict(patch_size=1), stem=STEM),
  dict(name='resnet', depths=(1, 1), width_factor=1, dtype='float32'),
  dict(
    name='swin',
    width=12,
    depths=(2, 2),
    num_heads=3,
    window_size=2,
    dtype='float32',
  ),
  dict(name='axial_vit', **SIZES),
  dict(name='axial_resnet', depths=(1, 1), dtype='float32'),
]


def foreign_models() -> Iterator[tuple[str, Any]]:
  """Yields (name, model) of timm and Hugging Face, with random weights."""
  import torch

  # As in benchmarks/peers.py: torchvision may be built for another torch.
  library = torch.library.Library('torchvision', 'DEF')
  for name in ('nms', 'qnms'):
    with contextlib.suppress(RuntimeError):
      library.define(f'{name}(Tensor dets, Tensor scores, float t) -> Tensor')
  timm: Any = importlib.import_module('timm')
  transformers: Any = importlib.import_module('transformers')

  def noisy(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
      for parameter in model.parameters():
        if parameter.requires_grad:
          parameter.normal_(0.1, 0.2, generator=generator)
    return model.eval()

  sizes = dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=4)
  names = (
    'vit_base_patch16_224',
    'vit_base_patch16_siglip_224',
    'deit_base_distilled_patch16_224',
    'deit3_base_patch16_224',
    'vit_small_patch14_reg4_dinov2',
    'vit_giant_patch14_dinov2',
    'vit_base_patch16_clip_quickgelu_224',
  )
  for name in names:
    model = timm.create_model(name, num_classes=7, **sizes)
    yield f'timm_{name}', noisy(model)
  swin: dict[str, Any] = dict(
    embed_dim=12, depths=(2, 2), num_heads=(3, 6), window_size=2
  )
  model = timm.models.swin_transformer.SwinTransformer(
    img_size=32, patch_size=4, num_classes=7, **swin
  )
  yield 'timm_swin', noisy(model)
  vit = dict(
    image_size=16,
    patch_size=4,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
  )
  swin = dict(image_size=32, patch_size=4) | swin
  names = 'ViT DeiT Dinov2 Dinov2WithRegisters DINOv3ViT ViTMAE Swin'
  for name in names.split():
    keys = swin if name == 'Swin' else vit
    config = getattr(transformers, f'{name}Config')(**keys, num_labels=7)
    head = getattr(transformers, f'{name}ForImageClassification', None)
    model = head or getattr(transformers, f'{name}Model')
    yield f'hf_{name}', noisy(model(config))


def write_foreign(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Writes the files of `foreign_models`; returns {name: path}."""
  import safetensors.torch

  paths = {}
  for name, model in foreign_models():
    paths[name] = folder / name
    if name.startswith('hf_'):
      model.save_pretrained(folder / name)
      continue
    paths[name] = folder / name / 'model.safetensors'
    paths[name].parent.mkdir()
    safetensors.torch.save_model(model, str(paths[name]))
    architecture = name.removeprefix('timm_')
    if architecture != 'swin':
      about = dict(architecture=architecture, model_args=dict(num_heads=4))
      (folder / name / 'config.json').write_text(json.dumps(about))
  return paths
