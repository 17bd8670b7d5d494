"""Notes next to an `.npz` file: what its arrays do not show.

The file itself stays as other projects read it. The notes in `FILE.npz.json`
contain a digest of the arrays, so that notes of other weights are not used.
"""

import hashlib
import json
import logging
import zipfile
from typing import Any

from vit_jax.errors import UserError
from vit_jax.files import paths
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
}


def _digest(path: str) -> str:
  """Returns a SHA-256 of the names and checksums of a file's arrays."""
  with paths.locate(path).open('rb') as file, zipfile.ZipFile(file) as archive:
    members = sorted((each.filename, each.CRC) for each in archive.infolist())
  return hashlib.sha256(json.dumps(members).encode()).hexdigest()


def read(path: str) -> Unseen | None:
  """Returns the notes next to a file; None if there are none of its own.

  Args:
    path: path of the .npz file, which can be read.

  Raises:
    UserError: the notes are damaged.
  """
  place = f'{path}.json'
  found = settings.read(place)
  if _DIGEST not in found:
    return None
  found = settings.validated(place, found, _RULES)
  if found[_DIGEST] != _digest(path):
    log.warning('%s belongs to other weights than %s: not used', place, path)
    return None
  return Unseen(
    known_from=place,
    gelu=found.get('gelu', 'tanh'),
    epsilon=found.get('norm_eps'),
    preprocess=found.get('preprocess', {}),
    class_names=found.get('class_names', ()),
  )


def write(path: str, model: Any, about: dict[str, Any]) -> None:
  """Writes the notes next to a file that has just been written.

  Args:
    path: path of the .npz file.
    model: model of the weights.
    about: description of the weights, see `Pretrained.about`.

  Raises:
    UserError: they cannot be written.
  """
  notes: dict[str, Any] = {
    _DIGEST: _digest(path),
    'preprocess': about.get('preprocess', {}),
    'class_names': list(about.get('class_names', ())),
  }
  for key in ('gelu', 'norm_eps'):  # a ResNet has neither
    if hasattr(model, key):
      notes[key] = getattr(model, key)
  try:
    paths.locate(f'{path}.json').write_text(json.dumps(notes, indent=2))
  except OSError as error:
    raise UserError(f'{path}.json cannot be written: {error}.') from error
