"""Writes the table of weights that can be opened into docs/weights.md.

Usage: python benchmarks/write_weights_page.py

Types, endings and architectures are those of the code; a type without an
address here is an error. Run it after a change and commit the page.
"""

import pathlib

from vit_jax.weights.formats import (
  damage,
  huggingface,
  timm_layouts,
  timm_models,
)

PAGE = pathlib.Path(__file__).resolve().parents[1] / 'docs' / 'weights.md'
START, END = '<!-- weights -->\n\n', '\n<!-- end of weights -->'
TIMM = f'timm {timm_models.version()}'
TRANSFORMERS = huggingface.VERSION
TORCHVISION = 'torchvision 0.28'
MAE = 'https://dl.fbaipublicfiles.com/mae/pretrain/mae_pretrain_vit_base.pth'
DINO = 'https://dl.fbaipublicfiles.com/dino'
DEIT = 'https://dl.fbaipublicfiles.com/deit'
SWIN = 'https://github.com/SwinTransformer/storage/releases/download'
# {type: repository}
HUGGING_FACE = {
  'vit': 'google/vit-base-patch16-224',
  'deit': 'facebook/deit-base-distilled-patch16-224',
  'beit': 'microsoft/beit-base-patch16-224-pt22k-ft22k',
  'data2vec-vision': 'facebook/data2vec-vision-base',
  'dinov2': 'facebook/dinov2-base',
  'dinov2_with_registers': 'facebook/dinov2-with-registers-base',
  'dinov3_vit': 'facebook/dinov3-vitb16-pretrain-lvd1689m',
  'vit_mae': 'facebook/vit-mae-base',
  'vit_msn': 'facebook/vit-msn-base',
  'ijepa': 'facebook/ijepa_vith14_1k',
  'clip_vision_model': 'openai/clip-vit-base-patch32',
  'siglip_vision_model': 'google/siglip2-base-patch16-224',
  'siglip2_vision_model': 'google/siglip2-base-patch16-naflex',
  'swin': 'microsoft/swin-tiny-patch4-window7-224',
}
# Types that are written, too; test_huggingface_types.py writes each of them
WRITTEN = {'vit', 'deit', 'dinov2', 'dinov2_with_registers', 'dinov3_vit'}
NOTES = {
  'vit_mae': 'also the decoder',
  'clip_vision_model': 'also in `clip`, with its text tower',
  'siglip_vision_model': 'also in `siglip`, with its text tower',
  'siglip2_vision_model': 'NaFlex, for square images; also in `siglip2`',
  'beit': 'without absolute positions next to relative ones',
  'dinov2': 'also the classifiers',
  'dinov2_with_registers': 'also the classifiers',
}
# {first layer: (name, address, library)}
PROJECTS = {
  'conv_proj.weight': (
    'torchvision, `vit_*`',
    'https://download.pytorch.org/models/vit_b_16-c867db91.pth',
    TORCHVISION,
  ),
  'features.0.0.weight': (
    'torchvision, `swin_t`, `swin_s`, `swin_b`',
    'https://download.pytorch.org/models/swin_t-704ceda3.pth',
    TORCHVISION,
  ),
  'ln_post.weight': (
    'open_clip and CLIP, image towers, also those of timm',
    'hf:laion/CLIP-ViT-B-32-laion2B-s34B-b79K/open_clip_pytorch_model.bin',
    'open_clip 3.3',
  ),
}


def rows():
  """Returns the rows: weights, written as, address, compared with."""
  table = timm_models.table()
  names = [name for name in table if '.' not in name]
  supported = [n for n in names if table[n].block not in timm_models.REFUSED]
  result = [
    (
      'this paper, AugReg, hybrids (`.npz`)',
      'FILE.npz',
      'gs://vit_models/imagenet21k/ViT-B_16.npz',
      "the authors' modules, written again",
    ),
    (
      'BiT (`.npz`)',
      'FILE.npz',
      'https://storage.googleapis.com/bit_models/BiT-M-R50x1.npz',
      "the authors' modules, written again",
    ),
    (
      'big_vision (`.npz`): GAP and MAP pooling, scanned layers',
      'big_vision:FILE.npz',
      'gs://big_vision/vit_s16_i1k_90ep.npz',
      "the authors' modules, written again",
    ),
    (
      f'timm, {len(supported)} of its {len(names)} Vision Transformers and '
      'Swins',
      'FILE.safetensors',
      'hf:timm/vit_base_patch16_224.augreg2_in21k_ft_in1k',
      TIMM,
    ),
    ('MAE, also the decoder', '', MAE, f'{TIMM}, {TRANSFORMERS}'),
    (
      'DINO',
      '',
      f'{DINO}/dino_deitsmall16_pretrain/dino_deitsmall16_pretrain.pth',
      TIMM,
    ),
    (
      "DINOv2, the authors' files, also teachers in chunks",
      '',
      'https://dl.fbaipublicfiles.com/dinov2/dinov2_vitb14/'
      'dinov2_vitb14_pretrain.pth',
      TIMM,
    ),
    (
      "DINOv3, the authors' files, also teachers",
      '',
      'dinov3_vitb16_pretrain_lvd1689m-73cec8be.pth',
      TIMM,
    ),
    ('DeiT', '', f'{DEIT}/deit_base_patch16_224-b5f2ef4d.pth', TIMM),
    (
      "Swin, the authors' files",
      '',
      f'{SWIN}/v1.0.0/swin_tiny_patch4_window7_224.pth',
      TIMM,
    ),
  ]
  for first in timm_layouts.PROJECTS:
    name, address, library = PROJECTS[first]
    result.append((name, '', address, library))
  for kind in huggingface.TYPES:
    note = f', {NOTES[kind]}' if kind in NOTES else ''
    written = 'huggingface:DIR' if kind in WRITTEN else ''
    address = f'hf:{HUGGING_FACE[kind]}'
    result.append(
      (f'Hugging Face `{kind}`{note}', written, address, TRANSFORMERS)
    )
  result += [
    ('Hugging Face `timm_wrapper`', '', 'the same as for timm', TIMM),
    ('workdirs and checkpoint step directories of vit_jax', 'DIR', '', ''),
  ]
  return result


def text():
  """Returns the table, and the endings of files."""
  lines = [
    '| weights | written as | address | compared with |',
    '|---|---|---|---|',
  ]
  for weights, written, address, library in rows():
    quoted = [
      f'`{x}`' if ':' in x or '.' in x else x for x in (written, address)
    ]
    quoted[0] = f'`{written}`' if written else '–'
    lines.append(f'| {weights} | {quoted[0]} | {quoted[1]} | {library} |')
  endings = ', '.join(f'`{ending}`' for ending in damage.PICKLES)
  lines += [
    '',
    f'Endings of PyTorch files are {endings} in any case, next to',
    '`.safetensors`; PyTorch has to be installed for them.',
  ]
  return '\n'.join(lines) + '\n'


def page(current):
  """Returns a page whose table is replaced by the current one."""
  before, _, rest = current.partition(START)
  _, _, after = rest.partition(END)
  return f'{before}{START}{text()}{END}{after}'


if __name__ == '__main__':
  PAGE.write_text(page(PAGE.read_text()))
