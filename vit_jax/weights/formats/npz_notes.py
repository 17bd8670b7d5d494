"""Notes next to an `.npz` file: settings that its arrays do not determine.

They are in a separate file, `FILE.npz.json`, so that other projects can read
the `.npz` file. They contain a digest of the arrays, so that notes that belong
to other weights are ignored.
"""

import hashlib
import json
import logging
import zipfile
from typing import Any

from vit_jax.data.augment.transforms import square
from vit_jax.errors import UserError
from vit_jax.files import atomic, paths
from vit_jax.models.positions import METHODS
from vit_jax.weights.formats import foreign, settings
from vit_jax.weights.formats.foreign import Unseen

log = logging.getLogger('vit_jax')
_DIGEST = 'vit_jax_arrays'
_RULES: settings.Rules = {
  _DIGEST: settings.TEXT,
  'gelu': settings.choice(foreign.KINDS_OF_GELU),
  'norm_eps': settings.number(0, 1),
  'preprocess': {},
  'class_names': settings.NAMES,
  'image_size': settings.several(settings.SIDE, 2, 2),
  'position_resize': settings.choice(METHODS),
}


def _digest(path: str) -> str:
  """Returns a SHA-256 of the names and checksums of the arrays in a file."""
  with paths.locate(path).open('rb') as file, zipfile.ZipFile(file) as archive:
    members = sorted((each.filename, each.CRC) for each in archive.infolist())
  return hashlib.sha256(json.dumps(members).encode()).hexdigest()


def read(path: str) -> Unseen | None:
  """Returns the notes that are stored next to an .npz file.

  Args:
    path: path of the .npz file; it must be readable.

  Returns:
    The notes; None if there are none, or if they describe other arrays.

  Raises:
    UserError: the notes are damaged.
  """
  file = f'{path}.json'
  notes = settings.read(file)
  if _DIGEST not in notes:
    return None
  notes = settings.validated(file, notes, _RULES)
  if notes[_DIGEST] != _digest(path):
    log.warning('%s belongs to other weights than %s: not used', file, path)
    return None
  return Unseen(
    known_from=file,
    gelu=notes.get('gelu', 'tanh'),
    epsilon=notes.get('norm_eps'),
    preprocess=notes.get('preprocess', {}),
    class_names=notes.get('class_names', ()),
    image_size=tuple(notes.get('image_size', ())) or None,
    position_resize=notes.get('position_resize'),
  )


def write(path: str, model: Any, about: dict[str, Any]) -> None:
  """Writes the notes next to a file that has just been written.

  Args:
    path: path of the .npz file.
    model: model of the weights.
    about: description of the weights, see `Pretrained.about`.

  Raises:
    UserError: the notes cannot be written.
  """
  notes: dict[str, Any] = {
    _DIGEST: _digest(path),
    'preprocess': about.get('preprocess', {}),
    'class_names': list(about.get('class_names', ())),
    'image_size': list(square(tuple(about['image_size']))),
  }
  if 'position_resize' in about:
    notes['position_resize'] = about['position_resize']
  for key in ('gelu', 'norm_eps'):  # a ResNet has neither
    if hasattr(model, key):
      notes[key] = getattr(model, key)
  try:
    atomic.write(paths.locate(f'{path}.json'), json.dumps(notes, indent=2))
  except OSError as error:
    raise UserError(f'{path}.json cannot be written: {error}.') from error
