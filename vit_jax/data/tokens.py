"""Numbers of the pieces of a text, from a tokenizer file of another project.

A `.json` file is one of Hugging Face's package `tokenizers`, any other file a
model of SentencePiece.
"""

import functools
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from vit_jax.errors import UserError, required
from vit_jax.files import paths

_PUNCTUATION = str.maketrans('', '', string.punctuation)


class Preset(NamedTuple):
  """Treatment of texts by a family of models.

  Attributes:
    vocabulary: number of pieces of the tokenizer.
    length: tokens of a text.
    pieces: the piece before a text, unless there is none; the piece after it,
      also after a text that is cut; and that after the end.
    address: where the tokenizer is published.
  """

  vocabulary: int
  length: int
  pieces: tuple[str, ...]
  address: str


_SIGLIP = 'gs://t5-data/vocabs/cc_en.32000/sentencepiece.model'
_HUB = 'https://huggingface.co'
_SIGLIP2 = f'{_HUB}/google/siglip2-base-patch16-224 (tokenizer.json)'
_CLIP = f'{_HUB}/openai/clip-vit-base-patch16 (tokenizer.json)'
_CLIP_PIECES = '<|startoftext|>', '<|endoftext|>', '<|endoftext|>'
# All three use lower case. SigLIP pads with the end, and CLIP, whose tower ends
# at the first end, may do so.
PRESETS = {
  'siglip': Preset(32_000, 64, ('</s>', '</s>'), _SIGLIP),
  'siglip2': Preset(256_000, 64, ('<eos>', '<pad>'), _SIGLIP2),
  'clip': Preset(49_408, 77, _CLIP_PIECES, _CLIP),
}


@functools.lru_cache(maxsize=4)
def load(path: str, preset: str) -> Callable[[str, int], Any]:
  """Reads a tokenizer file.

  Returns a function of a text and a length. It returns the tokens of the text,
  int32, cut or padded to the length.

  Args:
    path: file, local or on gs://.
    preset: key of `PRESETS`.

  Raises:
    UserError: the file does not exist, is not a tokenizer or lacks a piece, or
      a package is not installed.
  """
  rules = PRESETS[preset]
  library, read = 'sentencepiece', _sentencepiece_model
  if path.endswith('.json'):
    library, read = 'tokenizers', _huggingface_tokenizer
  package = required(library, 'the tokenizer of texts', 'vit_jax[text]')
  advice = f'that of the preset {preset!r} is published at {rules.address}'
  try:
    content = paths.locate(path).read_bytes()
    encode, token_of = read(package, content)
  except Exception as error:  # noqa: BLE001 (the libraries raise many kinds)
    raise UserError(
      f'the tokenizer {path!r} cannot be read ({paths.reason(error)}); {advice}'
      ': download it, and give its path as augment.tokenizer and '
      'preprocess.tokenizer.'
    ) from error
  added = [token_of(piece) for piece in rules.pieces]
  if None in added:
    raise UserError(
      f'the tokenizer {path} does not have the pieces {rules.pieces} of the '
      f'preset {preset!r}: use its own, of {", ".join(PRESETS)}; {advice}.'
    )
  *start, end, pad = added

  def tokens(text: str, length: int) -> Int[np.ndarray, ' length']:
    found = [*start, *encode(text.lower())][: length - 1]
    row = np.full(length, pad, np.int32)
    row[: len(found) + 1] = [*found, end]
    return row

  return tokens


def _huggingface_tokenizer(package: Any, content: bytes) -> tuple[Any, Any]:
  """Returns functions of a text to its tokens, and of a piece to its token."""
  model = package.Tokenizer.from_buffer(content)
  model.no_padding()
  model.no_truncation()
  encode = functools.partial(model.encode, add_special_tokens=False)
  return lambda text: encode(text).ids, model.token_to_id


def _sentencepiece_model(package: Any, content: bytes) -> tuple[Any, Any]:
  """Returns the same functions as `_huggingface_tokenizer`."""
  model = package.SentencePieceProcessor()
  model.LoadFromSerializedProto(content)
  tokens = range(model.GetPieceSize())
  return model.EncodeAsIds, {model.IdToPiece(i): i for i in tokens}.get


def canonical(text: str) -> str:
  """Returns a text in lower case, without punctuation and further blanks."""
  words = text.replace('_', ' ').lower().translate(_PUNCTUATION).split()
  return ' '.join(words)
