"""Data of an HTML report, read from the workdir of a run.

Pictures require images and weights, and are therefore stored in
WORKDIR/report.json, so that reports that are written later contain them too.
"""

import ast
import base64
import itertools
import json
import os
import pathlib
import re
from typing import Any, NamedTuple

import cv2
import numpy as np
from etils import epath
from jaxtyping import UInt8

from vit_jax.analysis import curves, gallery
from vit_jax.analysis.gallery import FIGURES
from vit_jax.config import durations
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths
from vit_jax.run import ledger

PICTURES = 'report.json'  # written when a run ends and by the command `report`
_MAX_FIGURE_BYTES = 2**20  # larger figures are left out
_MAX_SIDE = 160  # larger images are shrunk to this side length, pixels
_MAX_PNG_SIDE = 64  # JPEG blocks would be visible in such small images, pixels


class Record(NamedTuple):
  """Content of the workdir of a run.

  Attributes:
    name: name of the workdir.
    config: content of config.json; {} if the file is missing or damaged.
    run: content of run.json; {} if the file is missing or damaged.
    series: (steps, values) of each metric.
    nulls: (step, metric) of each value that was not finite.
    events: lines of events.jsonl.
    pictures: pictures and predictions, see `write`.
    figures: PNG files of the folder of figures, by name.
    figures_of: `weights` and `images` from which the figures were drawn.
    total_steps: length of the whole training; None if the config does not
      contain it.
  """

  name: str
  config: dict[str, Any]
  run: dict[str, Any]
  series: curves.Series
  nulls: list[tuple[int, str]]
  events: list[dict[str, Any]]
  pictures: dict[str, Any]
  figures: dict[str, bytes]
  figures_of: dict[str, Any]
  total_steps: int | None

  @property
  def step(self) -> int:
    """Last step at which a metric was logged."""
    return max((steps[-1] for steps, _ in self.series.values()), default=0)

  @property
  def command(self) -> list[str]:
    """Command line of the last start; [] without one."""
    command = self.run.get('command', [])
    return [str(word) for word in command] if isinstance(command, list) else []

  @property
  def config_path(self) -> str:
    """Value of --config in the command line; '' without one."""
    for word, value in itertools.pairwise([*self.command, '']):
      if word.startswith('--config='):
        return word.partition('=')[2]
      if word == '--config':
        return value
    return ''

  @property
  def expected(self) -> str:
    """Paragraph 'Expected: …' of the config file's header; '' without one.

    The file is parsed, not executed. A relative path refers to the current
    directory.
    """
    path = self.config_path.partition(':')[0]
    if not path.endswith('.py') or '://' in path:
      return ''
    try:
      source = pathlib.Path(path).expanduser().read_text()
      header = ast.get_docstring(ast.parse(source)) or ''
    except (OSError, ValueError, SyntaxError):
      return ''
    match = re.search(
      r'^Expected: (.*?)(?=\n\s*\n|\n[A-Z]\w*: |\Z)', header, re.M | re.S
    )
    text = ' '.join(match[1].split()) if match else ''
    sentences = re.split(r'(?<=\.)\s+', text)
    if sentences[-1].endswith(':'):  # the sentence introduces a command
      sentences.pop()
    return ' '.join(sentences)

  @property
  def changes(self) -> dict[str, str]:
    """Config keys that flags changed, such as {'seed': '1'}."""
    pattern = re.compile(r'--config\.([\w.]+)=(.*)', re.DOTALL)
    matches = (pattern.match(word) for word in self.command)
    return {match[1]: match[2] for match in matches if match}

  @property
  def evaluations(self) -> list[str]:
    """Names of evaluators' metrics, for example 'test/accuracy'."""
    return sorted(name for name in self.series if '/' in name)


def read(workdir: epath.Path) -> Record:
  """Reads a workdir; missing or damaged parts are omitted.

  Raises:
    UserError: the directory is not a workdir, or a file cannot be read.
  """
  config = jsonl.read_object(workdir / 'config.json')
  run = jsonl.read_object(workdir / 'run.json')
  if not config and not (workdir / 'metrics.jsonl').exists():
    raise UserError(
      f'{workdir} contains neither config.json nor metrics.jsonl: give the '
      'workdir of a run.'
    )
  series, nulls = curves.read_all(workdir)
  return Record(
    name=os.path.basename(os.fspath(workdir).rstrip('/')),
    config=config,
    run=run,
    series=series,
    nulls=nulls,
    events=ledger.read(workdir / 'events.jsonl'),
    pictures=jsonl.read_object(workdir / PICTURES),
    figures=_figures(workdir / gallery.FOLDER),
    figures_of=gallery.about(workdir / gallery.FOLDER),
    total_steps=_total_steps(config),
  )


def _figures(folder: epath.Path) -> dict[str, bytes]:
  """Reads the figures that were drawn last, all from the same weights."""
  drawn = gallery.about(folder).get('figures', FIGURES)
  contents = {}
  for name in FIGURES:
    file = folder / f'{name}.png'
    if name in drawn and file.exists():
      content = file.read_bytes()
      if 0 < len(content) <= _MAX_FIGURE_BYTES:
        contents[name] = content
  return contents


def _total_steps(config: dict[str, Any]) -> int | None:
  """Returns the length of the training; None if the config is incomplete."""
  try:
    return durations.Length.of(config).total_steps
  except (KeyError, TypeError, UserError):
    return None


def picture(
  pixels: UInt8[np.ndarray, 'y x 3'], caption: list[str]
) -> dict[str, Any]:
  """Encodes an image for the page: `src` (a data URI) and `caption` (lines)."""
  scale = _MAX_SIDE / max(pixels.shape[:2])
  if scale < 1:
    size = [max(1, round(side * scale)) for side in pixels.shape[1::-1]]
    pixels = cv2.resize(pixels, size, interpolation=cv2.INTER_AREA)
  kind = 'png' if max(pixels.shape) <= _MAX_PNG_SIDE else 'jpeg'
  done, data = cv2.imencode(f'.{kind}', pixels[..., ::-1])
  assert done
  return {'src': data_uri(kind, data.tobytes()), 'caption': caption}


def data_uri(kind: str, content: bytes) -> str:
  """Returns an image as a data URI; `kind` is 'png', 'jpeg' or 'svg+xml'."""
  return f'data:image/{kind};base64,{base64.b64encode(content).decode()}'


def write(workdir: epath.Path, values: dict[str, Any]) -> None:
  """Writes pictures and predictions to WORKDIR/report.json.

  Args:
    workdir: directory of the run.
    values: `step`, `training` (pictures) and `judged`, from
      `training.reporting.predict_examples`.

  Raises:
    OSError: the file cannot be written.
  """
  paths.write(workdir / PICTURES, json.dumps(values))
