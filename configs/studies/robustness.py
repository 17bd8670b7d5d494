"""Robustness of ImageNet classifiers: six variants of the ImageNet test set.

python -m vit_jax.study --config=configs/studies/robustness.py
  --weights=weights=runs/finetune_imagenet --config.source.data_dir=TFDS_DIR

Evaluates weights that have a head for ImageNet's 1,000 classes; nothing is
trained. Top-1 accuracies:

| column          | TFDS data set                    | predictions among     |
| ImageNet        | imagenet2012                     | all 1,000 classes     |
| ImageNet-V2     | imagenet_v2/matched-frequency    | all 1,000 classes     |
| ImageNet-A      | imagenet_a                       | its 200 classes       |
| ImageNet-R      | imagenet_r                       | its 200 classes       |
| ImageNet-Sketch | imagenet_sketch                  | all 1,000 classes     |
| ImageNet-C      | imagenet2012_corrupted/NAME_1..5 | all 1,000; mean of 75 |

`columns=ImageNet-A` evaluates the columns whose names contain it. Labels are
matched by class name; all of these data sets have the 1,000 names of ImageNet.

Published numbers: MAE (facebookresearch/mae, README.md), fine-tuned at 224 px;
DeiT-B on ImageNet-V2 (arXiv 2012.12877, from memory). ImageNet-C is the mean
accuracy over 15 corruptions and five severities. MAE publishes the mean
corruption error instead, which divides the error of each corruption by that of
AlexNet (51.7, 41.8, 33.8 for B, L, H), so that the numbers cannot be compared.
"""

from vit_jax.config import parse_arg
from vit_jax.errors import UserError
from vit_jax.study.contents import Evaluation, Number, Published, Row, Study

_AMONG_ALL = Evaluation('calibration', 'accuracy', 'test')
_AMONG_PRESENT = _AMONG_ALL._replace(
  flags={'evals.calibration.among': 'present'}
)
_CORRUPTIONS = (
  'gaussian_noise',
  'shot_noise',
  'impulse_noise',
  'defocus_blur',
  'glass_blur',
  'motion_blur',
  'zoom_blur',
  'snow',
  'frost',
  'fog',
  'brightness',
  'contrast',
  'elastic_transform',
  'pixelate',
  'jpeg_compression',
)
COLUMNS = {
  'ImageNet': _AMONG_ALL._replace(dataset='imagenet2012', split='validation'),
  'ImageNet-V2': _AMONG_ALL._replace(dataset='imagenet_v2/matched-frequency'),
  'ImageNet-A': _AMONG_PRESENT._replace(dataset='imagenet_a'),
  'ImageNet-R': _AMONG_PRESENT._replace(dataset='imagenet_r'),
  'ImageNet-Sketch': _AMONG_ALL._replace(dataset='imagenet_sketch'),
}
for name in _CORRUPTIONS:
  for severity in range(1, 6):
    COLUMNS[f'ImageNet-C/{name}_{severity}'] = _AMONG_ALL._replace(
      dataset=f'imagenet2012_corrupted/{name}_{severity}', split='validation'
    )
# model: ImageNet, V2, A, R, Sketch
PUBLISHED = {
  'MAE B': (83.6, None, 35.9, 48.3, 34.5),
  'MAE L': (85.9, None, 57.1, 59.9, 45.3),
  'MAE H': (86.9, None, 68.2, 64.4, 49.6),
  'DeiT B': (81.8, 71.5, None, None, None),
}


def get_study(argument: str | None = None) -> Study:
  arg = parse_arg(argument, columns='')
  chosen = {key: each for key, each in COLUMNS.items() if arg.columns in key}
  if not chosen:
    raise UserError(
      f'columns={arg.columns} is in no name of a column; they are '
      f'{", ".join(dict.fromkeys(key.partition("/")[0] for key in COLUMNS))}.'
    )
  published = {
    model: Published(
      {
        column: Number(value)
        for column, value in zip(COLUMNS, values, strict=False)
        if value is not None and column in chosen
      }
    )
    for model, values in PUBLISHED.items()
  }
  return Study(
    title='Robustness: variants of ImageNet',
    rows={'weights': Row(pretrain=None, transfers=chosen)},
    published=published,
  )
