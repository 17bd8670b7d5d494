"""A folder with figures as PNG files, their arrays and a description."""

import io
import json
from typing import Any

import numpy as np
from etils import epath

from vit_jax.analysis import draw
from vit_jax.analysis.figures import Findings
from vit_jax.files import atomic, jsonl

FOLDER = 'figures'  # name of the folder in a workdir
_ABOUT = 'figures.json'


def save(
  folder: epath.Path, findings: Findings, about: dict[str, str]
) -> list[epath.Path]:
  """Draws the figures and writes them with their arrays.

  Args:
    folder: folder of the files, which is created if it does not exist.
    findings: arrays of the figures.
    about: texts that describe the weights and the images, with the keys
      'weights' and 'images'.

  Returns:
    Written files, in the order of writing.

  Raises:
    OSError: a file cannot be written.
    UserError: Matplotlib is not installed.
  """
  pictures = draw.all_figures(findings)
  files: dict[str, str | bytes] = {
    f'{name}.png': picture for name, picture in pictures.items()
  }
  files['figures.npz'] = archive(findings.arrays)
  files[_ABOUT] = json.dumps(about | {'figures': sorted(pictures)})
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in files.items():
    atomic.write(folder / name, content)
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
