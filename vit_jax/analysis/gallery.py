"""A folder with figures, their arrays and a description."""

import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

from vit_jax.analysis import draw
from vit_jax.analysis.draw import Photograph
from vit_jax.analysis.figures import Findings
from vit_jax.analysis.plotting import PNG, Format, encode
from vit_jax.files import jsonl, paths

FOLDER = 'figures'  # name of the folder in a workdir
_ABOUT = 'figures.json'


def save(
  folder: epath.Path,
  findings: Findings,
  about: dict[str, str],
  photographs: Sequence[Photograph] | None = None,
  form: Format = PNG,
) -> list[epath.Path]:
  """Draws the figures and writes them with their arrays.

  Args:
    folder: folder of the files, which is created if it does not exist.
    findings: arrays of the figures.
    about: texts that describe the weights and the images, with the keys
      'weights' and 'images'.
    photographs: photographs on which attention is drawn, in the order of the
      images; None for the images as the model receives them.
    form: format of the figures. The HTML report of a run shows only PNG files.

  Returns:
    Written files, in the order of writing.

  Raises:
    OSError: a file cannot be written.
    UserError: Matplotlib is not installed.
  """
  figures = draw.all_figures(findings, photographs)
  files: dict[str, str | bytes] = {}
  for name, pages in figures.items():
    for number, content in enumerate(encode(pages, form)):
      suffix = f'_{number + 1}' if number else ''
      files[f'{name}{suffix}.{form.name}'] = content
  files['figures.npz'] = archive(findings.arrays)
  if form.name == 'png':  # the description of the figures of the report
    files[_ABOUT] = json.dumps(about | {'figures': sorted(figures)})
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in files.items():
    paths.write(folder / name, content)
  return [folder / name for name in files]


def about(folder: epath.Path) -> dict[str, Any]:
  """Returns the description that `save` wrote, or {} if there is none."""
  description = jsonl.read_object(folder / _ABOUT)
  return description if isinstance(description.get('figures'), list) else {}


def archive(arrays: dict[str, np.ndarray]) -> bytes:
  """Returns the content of an .npz file with these arrays."""
  file = io.BytesIO()
  np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]
  return file.getvalue()
