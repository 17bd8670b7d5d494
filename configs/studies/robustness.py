"""Robustness of ImageNet classifiers: seven other test sets.

python -m vit_jax.study --config=configs/studies/robustness.py
  --weights=weights=runs/finetune_imagenet --config.source.data_dir=TFDS_DIR

Evaluates weights that have a head for ImageNet's 1,000 classes; nothing is
trained. Top-1 accuracies, if nothing else is stated:

| column          | TFDS data set                    | predictions among     |
| ImageNet        | imagenet2012                     | all 1,000 classes     |
| ImageNet-V2     | imagenet_v2/matched-frequency    | all 1,000 classes     |
| ImageNet-A      | imagenet_a                       | its 200 classes       |
| ImageNet-R      | imagenet_r                       | its 200 classes       |
| ImageNet-Sketch | imagenet_sketch                  | all 1,000 classes     |
| ObjectNet       | none, see below                  | all 1,000; also top-5 |
| ImageNet-C      | imagenet2012_corrupted/NAME_1..5 | all 1,000; mean of 75 |

`columns=ImageNet-A` evaluates the columns whose names contain it. Labels are
matched by class name; all of these data sets have the 1,000 names of ImageNet.

ObjectNet is read by the source `objectnet`: the 113 of its 313 classes that
correspond to one or several classes of ImageNet, each of which is correct.
TFDS does not have it: unpack objectnet-1.0.zip of objectnet.dev in TFDS_DIR.

The mean corruption error (mCE) of ImageNet-C divides the error of each of the
15 corruptions, a mean over five severities, by that of AlexNet, and averages
the ratios (Hendrycks and Dietterich, arXiv 1903.12261). Lower is better, and
AlexNet has 100. `python -m examples.study_results CONFIG WORKDIR` prints it.
Their code crops the images of 224 px without resizing them; here, all data sets
are preprocessed as the weights require.

Published numbers: MAE (facebookresearch/mae, README.md, which calls the mCE
"error rate"), fine-tuned at 224 px; DeiT-B on ImageNet-V2 (arXiv 2012.12877,
from memory); ViT-H/14, pre-trained on JFT-300M (Table 2 and appendix D.9 of the
paper, which evaluates ObjectNet as BiT does).
"""

import statistics
from collections.abc import Mapping
from typing import Any

from vit_jax.config import parse_arg
from vit_jax.errors import UserError
from vit_jax.sweeps.grid import Evaluation, Number, Row, Study

_AMONG_ALL = Evaluation('calibration', 'accuracy', 'test')
_AMONG_PRESENT = _AMONG_ALL._replace(
  flags={'evals.calibration.among': 'present'}
)
_OBJECTNET = _AMONG_ALL._replace(
  dataset='objectnet', flags={'evals.calibration.labels': 'imagenet_labels'}
)
# Errors of AlexNet, means over the severities, as in the authors' spreadsheet
# (the link is in README.md of hendrycks/robustness).
_ALEXNET_ERRORS = {
  'gaussian_noise': 0.886428,
  'shot_noise': 0.894468,
  'impulse_noise': 0.922640,
  'defocus_blur': 0.819880,
  'glass_blur': 0.826268,
  'motion_blur': 0.785948,
  'zoom_blur': 0.798360,
  'snow': 0.866816,
  'frost': 0.826572,
  'fog': 0.819324,
  'brightness': 0.564592,
  'contrast': 0.853204,
  'elastic_transform': 0.646056,
  'pixelate': 0.717840,
  'jpeg_compression': 0.606500,
}
_SEVERITIES = range(1, 6)
COLUMNS = {
  'ImageNet': _AMONG_ALL._replace(dataset='imagenet2012', split='validation'),
  'ImageNet-V2': _AMONG_ALL._replace(dataset='imagenet_v2/matched-frequency'),
  'ImageNet-A': _AMONG_PRESENT._replace(dataset='imagenet_a'),
  'ImageNet-R': _AMONG_PRESENT._replace(dataset='imagenet_r'),
  'ImageNet-Sketch': _AMONG_ALL._replace(dataset='imagenet_sketch'),
  'ObjectNet': _OBJECTNET,
  'ObjectNet top-5': _OBJECTNET._replace(metric='top5'),
}
CORRUPTED = {
  f'ImageNet-C/{name}_{severity}': _AMONG_ALL._replace(
    dataset=f'imagenet2012_corrupted/{name}_{severity}', split='validation'
  )
  for name in _ALEXNET_ERRORS
  for severity in _SEVERITIES
}
# The columns of `COLUMNS` in order, and the mCE.
PUBLISHED = {
  'MAE B': (83.6, None, 35.9, 48.3, 34.5, None, None, 51.7),
  'MAE L': (85.9, None, 57.1, 59.9, 45.3, None, None, 41.8),
  'MAE H': (86.9, None, 68.2, 64.4, 49.6, None, None, 33.8),
  'DeiT B': (81.8, 71.5, None, None, None, None, None, None),
  'ViT-H/14': (88.55, None, None, None, None, 61.7, 82.1, None),
}


def mean_corruption_error(accuracies: Mapping[str, float]) -> float:
  """Computes the mCE.

  Args:
    accuracies: top-1 accuracies in [0, 1], by the keys of `CORRUPTED`.
  """
  ratios = []
  for name, alexnet in _ALEXNET_ERRORS.items():
    keys = [f'ImageNet-C/{name}_{severity}' for severity in _SEVERITIES]
    ratios.append(statistics.fmean(1 - accuracies[k] for k in keys) / alexnet)
  return statistics.fmean(ratios)


def get_study(argument: str | None = None) -> Study:
  arg = parse_arg(argument, columns='')
  chosen = {
    key: each
    for key, each in {**COLUMNS, **CORRUPTED}.items()
    if arg.columns in key
  }
  if not chosen:
    raise UserError(
      f'columns={arg.columns} is in no name of a column; they are '
      f'{", ".join([*COLUMNS, "ImageNet-C"])}.'
    )
  papers = {
    model: {
      column: Number(value)
      for column, value in zip(COLUMNS, values, strict=False)
      if value is not None and column in chosen
    }
    for model, values in PUBLISHED.items()
  }
  return Study(
    title='Robustness: other test sets for ImageNet classifiers',
    rows={'weights': Row(pretrain=None, transfers=chosen)},
    published={name: paper for name, paper in papers.items() if paper},
  )


def get_extras(argument: str | None = None) -> dict[str, Any]:
  """Returns the mCE, see examples/study_results.py."""
  [row] = get_study(argument).rows.values()
  if not row.transfers.keys() >= CORRUPTED.keys():
    return {}
  papers = {
    name: Number(values[-1])
    for name, values in PUBLISHED.items()
    if values[-1] is not None
  }

  def errors(runs: Mapping[str, Any]) -> list[float]:
    means = {key: runs[key][0]['accuracy'] for key in CORRUPTED}
    return [mean_corruption_error(means)]

  return dict(columns={'ImageNet-C mCE (lower is better)': (errors, papers)})
