"""Table 8, Figures 4, 8, 9, 13: ImageNet 5-shot accuracy of pre-trained models.

python -m vit_jax.study --config=configs/studies/fewshot.py:table=8

`python -m examples.study_results CONFIG WORKDIR` draws the figures.

| argument  | rows                                         | its figure    |
| table=8   | position embeddings (configs/positions.py)   |               |
| figure=4  | models by subsets of 9, 30, 90, 300 M of JFT | over images   |
| figure=8  | depth, width, MLP, patch, or all of them     | over exaFLOPs |
| figure=9  | class token, or mean at two learning rates   | over epochs   |
| figure=13 | axial models, ViT-B and ResNet50             | over exaFLOPs |

figure=4,data=i21k is a variant of Figure 4 on public data; figure=13,x=speed is
the right panel of Figure 13. Both are described below.

The accuracy is that of section 4.1's regression from frozen features of five
images per class, drawn from train[:65000] as in the authors' public code, on
the validation split. The values of Table 8 are the paper's; the figures contain
no values. JFT-300M is not public: use your own data with
--pretrain.source.dataset=… and --pretrain.train.num_examples=….

Figure 4: every model is trained for as many steps as on all of JFT, and
evaluated at its best validation accuracy (the paper's early stopping). b/32 is
B/32 with all hidden sizes halved, here with 6 heads of 64 channels. The choice
of the six models was not checked against the figure.

Figure 4 with data=i21k: ViT-S/16, ViT-B/16, R50+B/16 and R50x1 on 0.3, 1, 3 and
10 M images of ImageNet-21k, not an experiment of the paper. Recipes are the
models' rows for JFT (those of B/16 for S/16). Every model is trained for 30
epochs of 10 M images, 73,242 steps. --plan=v3:4x4 (or h100:1x8) prints the
predicted cost of all rows before anything is started; docs/studies.md has both
tables.

Figure 8: the base has 8 layers, width 1024, MLP size 2048 and patch size 32.
The scaling factors are chosen here (the paper has up to 64 layers), and so is
the recipe, Table 3's row L/32. Heads have 64 channels. The line "all" scales
the four dimensions by about the same factor, 4/7, 8/7 or 2 (the patch size is
divided by it). With these factors, 224 pixels are a whole number of patches;
the depth is rounded, and the width is rounded to whole heads. The right panel
of the figure is left out: it is an average over several datasets, which the
paper does not list.

Figure 9: class token with learning rate 8e-4, and mean of the patches with
8e-4 and 3e-4, for 7 epochs; the model, B/16, is chosen here. It is evaluated
after every epoch within the training, so existing weights cannot replace its
pre-training.

Figure 13: Axial-ViT-B/32 and B/16, AxialResNet50, ViT-B/32 and B/16, and
ResNet50x1. The recipes of the axial models are chosen here, see
examples/axial.py. x=speed draws the same rows over the images per second and
core in inference at 224 px, which benchmarks/inference.py predicts for TPU v3;
the paper measured them.

  python -m examples.study_results configs/studies/fewshot.py:figure=13,x=speed
    runs/studies/fewshot-figure=13
"""

from typing import Any

from ml_collections import ConfigDict

from vit_jax.config import complete, loading, parse_arg
from vit_jax.errors import UserError, closest
from vit_jax.sweeps.grid import Evaluation, Number, Row, Stage, Study

_TRAIN = 'train[:65000]'
FEW = Evaluation(
  'fewshot',
  '5shot',
  'validation',
  dataset='imagenet2012',
  flags={'evals.fewshot.train_split': _TRAIN, 'evals.fewshot.shots': '(5,)'},
)
SUBSETS = (9_000_000, 30_000_000, 90_000_000, 303_000_000)
_STEPS = 7 * 303_000_000 // 4_096
_B_HALVED = {'model.width': 384, 'model.mlp_dim': 1_536, 'model.num_heads': 6}
# line: config, keys
MODELS_4: dict[str, tuple[str, dict[str, Any]]] = {
  'ViT-L/16': ('configs/vit.py:variant=L/16,data=jft,epochs=7', {}),
  'ViT-L/32': ('configs/vit.py:variant=L/32,data=jft', {}),
  'ViT-B/32': ('configs/vit.py:variant=B/32,data=jft', {}),
  'ViT-b/32': ('configs/vit.py:variant=B/32,data=jft', _B_HALVED),
  'ResNet50x1': ('configs/resnet.py:variant=R50x1', {}),
  'ResNet152x2': ('configs/resnet.py:variant=R152x2,epochs=7', {}),
}
# Figure 4 with public data
_I21K_VALIDATION = 51_200  # images; configs/vit.py holds out the same
SUBSETS_I21K = (300_000, 1_000_000, 3_000_000, 10_000_000)
_STEPS_I21K = 30 * SUBSETS_I21K[-1] // 4_096
_I21K = {
  'source.dataset': 'imagenet21k',
  'num_classes': 21_843,
  'evals.val.split': f'train[:{_I21K_VALIDATION}]',
}
MODELS_4_I21K: dict[str, tuple[str, dict[str, Any]]] = {
  'ViT-S/16': (
    'configs/vit.py:variant=B/16,data=jft',
    {'model.variant': 'S/16'},
  ),
  'ViT-B/16': ('configs/vit.py:variant=B/16,data=jft', {}),
  'R50+B/16': ('configs/vit.py:variant=R50+B/16,data=jft', {}),
  'ResNet50x1': ('configs/resnet.py:variant=R50x1', {}),
}
BASE_8 = dict(depth=8, width=1_024, mlp_dim=2_048, patch_size=32)
SCALED_8 = {
  'depth': (4, 16, 32, 64),
  'width': (512, 2_048),
  'mlp_dim': (1_024, 4_096, 8_192),
  'patch_size': (16, 8),
}
# About the same factor for all dimensions, by that factor
ALL_8 = {
  '4/7': dict(depth=5, width=576, mlp_dim=1_152, patch_size=56),
  '8/7': dict(depth=9, width=1_152, mlp_dim=2_304, patch_size=28),
  '2': dict(depth=16, width=2_048, mlp_dim=4_096, patch_size=16),
}
# row: config, exaFLOPs of Table 6, images per second and core (predicted, see
# benchmarks/inference.csv)
FIGURE_13: dict[str, tuple[str, float | None, float]] = {
  'Axial-ViT-B/32': ('examples/axial.py:variant=B/32', None, 1354),
  'Axial-ViT-B/16': ('examples/axial.py:variant=B/16', None, 338.7),
  'AxialResNet50': ('examples/axial.py:variant=R50', None, 117.1),
  'ViT-B/32': ('configs/vit.py:variant=B/32,data=jft', 55, 4196),
  'ViT-B/16': ('configs/vit.py:variant=B/16,data=jft', 224, 1204),
  'ResNet50x1': ('configs/resnet.py:variant=R50x1', 50, 2578),
}
# row: pooling, learning rate
FIGURE_9 = {
  'class token, 8e-4': ('token', 8e-4),
  'mean, 8e-4': ('gap', 8e-4),
  'mean, 3e-4': ('gap', 3e-4),
}


def get_study(argument: str | None = None) -> Study:
  return _study(argument)[0]


def get_extras(argument: str | None = None) -> dict[str, Any]:
  """Returns the figure, see examples/study_results.py."""
  figure = _study(argument)[1]
  return dict(figure=figure) if figure else {}


def _study(argument: str | None) -> tuple[Study, dict[str, Any]]:
  """Returns a study, and its figure."""
  arg = parse_arg(argument, table=0, figure=0, data='jft', x='exaflops')
  made = {
    'table=8': _table_8,
    'figure=4': _figure_4,
    'figure=8': _figure_8,
    'figure=9': _figure_9,
    'figure=13': _figure_13,
  }
  wanted = f'figure={arg.figure}' if arg.figure else f'table={arg.table}'
  if wanted not in made:
    given = '' if wanted == 'table=0' else f'{wanted} is not here; '
    raise UserError(
      f'{given}choose a table or a figure, as in --config=configs/studies/'
      f'fewshot.py:table=8; {closest(wanted, made)}.'
    )
  if (wanted, arg.data, arg.x) == ('figure=4', 'i21k', 'exaflops'):
    return _figure_4_i21k()
  if (wanted, arg.data, arg.x) == ('figure=13', 'jft', 'speed'):
    return _figure_13('images_per_second')
  if (arg.data, arg.x) != ('jft', 'exaflops'):
    raise UserError(
      f'data={arg.data!r} and x={arg.x!r} with {wanted}: allowed are data=jft '
      'and x=exaflops; for figure=4 also data=i21k, and for figure=13 x=speed.'
    )
  return made[wanted]()


def _table_8() -> tuple[Study, dict[str, Any]]:
  rows = {}
  numbers = {
    ('none', ''): 61.382,
    ('learned', 'stem'): 64.206,
    ('learned', 'layers'): 63.964,
    ('learned', 'shared'): 64.292,
    ('2d', 'stem'): 64.001,
    ('2d', 'layers'): 64.046,
    ('2d', 'shared'): 64.022,
    # The paper prints it in the column of the stem; offsets act in every layer.
    ('relative', 'layers'): 64.032,
  }
  for (kind, at), number in numbers.items():
    where = f',at={at}' if at else ''
    rows[f'{kind} {at}'.strip()] = Row(
      pretrain=_pretraining(f'configs/positions.py:kind={kind}{where}'),
      transfers={'5-shot': FEW},
      paper={'5-shot': Number(number)},
    )
  return Study(title='Table 8: position embeddings, ViT-B/16', rows=rows), {}


def _figure_4() -> tuple[Study, dict[str, Any]]:
  rows, points = {}, {}
  for line, (config, keys) in MODELS_4.items():
    for size in SUBSETS:
      flags: dict[str, Any] = {**keys, 'total': f'{_STEPS} steps'}
      if size != SUBSETS[-1]:
        flags |= {'train.split': f'train[:{size}]', 'train.num_examples': size}
      name = f'{line} {size // 10**6}M'
      rows[name], points[name] = _on_subset(config, flags), (line, size)
  title = 'Figure 4: 5-shot accuracy by the size of the pre-training set'
  return Study(title=title, rows=rows), _by_images(points)


def _figure_4_i21k() -> tuple[Study, dict[str, Any]]:
  rows, points = {}, {}
  for line, (config, keys) in MODELS_4_I21K.items():
    for size in SUBSETS_I21K:
      stop = _I21K_VALIDATION + size
      flags: dict[str, Any] = {
        **_I21K,
        **keys,
        'total': f'{_STEPS_I21K} steps',
        'train.split': f'train[{_I21K_VALIDATION}:{stop}]',
        'train.num_examples': size,
      }
      name = f'{line} {size / 10**6:g}M'
      rows[name], points[name] = _on_subset(config, flags), (line, size)
  title = '5-shot accuracy by the number of images of ImageNet-21k'
  return Study(title=title, rows=rows), _by_images(points)


def _by_images(points: dict[str, tuple[str, int]]) -> dict[str, Any]:
  """Returns a figure over images, given (line, images) of each row."""
  return dict(
    x='images',
    columns=('5-shot',),
    lines={name: (line,) for name, (line, _) in points.items()},
    places={name: size for name, (_, size) in points.items()},
  )


def _on_subset(config: str, flags: dict[str, Any]) -> Row:
  """Returns the row of a model that is trained on a part of the images."""
  often = {'checkpoint.every': '1 %', 'evals.val.every': '1 %'}
  return Row(
    pretrain=_pretraining(config, flags | often),
    transfers={'5-shot': FEW},
    early_stopping=True,
  )


def _figure_8() -> tuple[Study, dict[str, Any]]:
  rows, lines = {'base': _scaled(BASE_8)}, {'base': (*SCALED_8, 'all')}
  for dimension, sizes in SCALED_8.items():
    for size in sizes:
      name = f'{dimension} {size}'
      rows[name] = _scaled(BASE_8 | {dimension: size})
      lines[name] = (dimension,)
  for factor, sizes in ALL_8.items():
    rows[f'all x {factor}'] = _scaled(sizes)
    lines[f'all x {factor}'] = ('all',)
  title = 'Figure 8: the dimensions of a ViT scaled one by one, and together'
  figure = dict(x='exaflops', columns=('5-shot',), lines=lines)
  return Study(title=title, rows=rows), figure


def _scaled(sizes: dict[str, int]) -> Row:
  flags = {f'model.{key}': value for key, value in sizes.items()}
  flags |= {'model.num_heads': sizes['width'] // 64, 'model.unroll': 1}
  config = 'configs/vit.py:variant=L/32,data=jft'
  return Row(
    pretrain=_pretraining(config, flags),
    transfers={'5-shot': FEW},
  )


def _figure_9() -> tuple[Study, dict[str, Any]]:
  rows = {
    name: Row(
      pretrain=Stage(
        f'configs/studies/fewshot.py:pool={pool}',
        'few/5shot',
        {'schedule.base_lr': rate},
      )
    )
    for name, (pool, rate) in FIGURE_9.items()
  }
  title = 'Figure 9: class token or mean of the patches, 5-shot'
  figure = dict(x='epochs', columns=('few/5shot',))
  return Study(title=title, rows=rows), figure


def _figure_13(x: str = 'exaflops') -> tuple[Study, dict[str, Any]]:
  rows = {
    name: Row(pretrain=_pretraining(config), transfers={'5-shot': FEW})
    for name, (config, _, _) in FIGURE_13.items()
  }
  places = {
    name: exaflops if x == 'exaflops' else speed
    for name, (_, exaflops, speed) in FIGURE_13.items()
  }
  places = {name: place for name, place in places.items() if place is not None}
  title = 'Figure 13: axial attention, 5-shot'
  figure = dict(x=x, columns=('5-shot',), places=places)
  return Study(title=title, rows=rows), figure


def _pretraining(config: str, flags: dict[str, Any] | None = None) -> Stage:
  return Stage(config, 'val/accuracy', flags or {})


def get_config(argument: str | None = None) -> ConfigDict:
  """Figure 9's pre-training, evaluated after every epoch."""
  arg = parse_arg(argument, pool='token')
  config = loading.load('configs/vit.py:variant=B/16,data=jft').to_dict()
  config['model']['pool'] = arg.pool
  config['evals']['few'] = dict(
    name='fewshot',
    split='validation',
    train_split=_TRAIN,
    source=dict(name='tfds', dataset='imagenet2012'),
    shots=(5,),
    every='1 epochs',
  )
  config['checkpoint']['best'] = 'few/5shot'
  return complete(ConfigDict(config))
