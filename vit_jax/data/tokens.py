"""Numbers of the pieces of a text, from a tokenizer file of another project.

A `.json` file is one of Hugging Face's package `tokenizers`, any other file a
model of SentencePiece.
"""

import functools
import re
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
    address: where the tokenizer is published.
    vocabulary: number of its pieces.
    end: piece after a text, also after one that is cut.
    pad: piece after the end.
    length: tokens of a text.
    start: piece before a text; '' for none.
  """

  address: str
  vocabulary: int
  end: str
  pad: str
  length: int = 64
  start: str = ''


# All three use lower case. SigLIP pads with the end, and CLIP, whose tower ends
# at the first end, may do so.
PRESETS = {
  'siglip': Preset(
    'gs://t5-data/vocabs/cc_en.32000/sentencepiece.model',
    32_000,
    '</s>',
    '</s>',
  ),
  'siglip2': Preset(
    'https://huggingface.co/google/siglip2-base-patch16-224 (tokenizer.json)',
    256_000,
    '<eos>',
    '<pad>',
  ),
  'clip': Preset(
    'https://huggingface.co/openai/clip-vit-base-patch16 (tokenizer.json)',
    49_408,
    '<|endoftext|>',
    '<|endoftext|>',
    77,
    '<|startoftext|>',
  ),
}


@functools.lru_cache(maxsize=4)
def load(
  path: str, preset: str
) -> Callable[[str, int], Int[np.ndarray, ' length']]:
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
  advice = f'that of the preset {preset!r} is published at {rules.address}'
  try:
    content = paths.locate(path).read_bytes()
  except OSError as error:
    raise UserError(
      f'the tokenizer {path!r} cannot be read ({paths.reason(error)}); {advice}'
      ': download it, and give its path as augment.tokenizer and '
      'preprocess.tokenizer.'
    ) from error
  is_json = path.endswith('.json')
  package = required(
    'tokenizers' if is_json else 'sentencepiece',
    'the tokenizer of texts',
    'vit_jax[text]',
  )
  try:
    encode, number = (_json if is_json else _pieces)(package, content)
  except Exception as error:  # noqa: BLE001 (the libraries raise many kinds)
    raise UserError(f'{path} is not a tokenizer: {error}; {advice}.') from error
  pieces = [*filter(None, [rules.start]), rules.end, rules.pad]
  numbers = [number(piece) for piece in pieces]
  if None in numbers:
    raise UserError(
      f'the tokenizer {path} does not have the pieces {pieces} of the preset '
      f'{preset!r}: use its own preset, of {", ".join(PRESETS)}; {advice}.'
    )
  *start, end, pad = numbers

  def tokens(text: str, length: int) -> Int[np.ndarray, ' length']:
    found = [*start, *encode(text.lower())][: length - 1]
    row = np.full(length, pad, np.int32)
    row[: len(found) + 1] = [*found, end]
    return row

  return tokens


def _json(package: Any, content: bytes) -> Any:
  """Returns functions from text to numbers, and from a piece to its number."""
  model = package.Tokenizer.from_buffer(content)
  model.no_padding()
  model.no_truncation()
  return (
    lambda text: model.encode(text, add_special_tokens=False).ids,
    model.token_to_id,
  )


def _pieces(package: Any, content: bytes) -> Any:
  """Returns the same functions as `_json` for SentencePiece."""
  model = package.SentencePieceProcessor()
  model.LoadFromSerializedProto(content)

  def number(piece: str) -> int | None:
    found = model.PieceToId(piece)
    return found if model.IdToPiece(found) == piece else None

  return model.EncodeAsIds, number


def canonical(text: str) -> str:
  """Returns a text in lower case, without punctuation and further blanks."""
  text = text.replace('_', ' ').lower().translate(_PUNCTUATION)
  return re.sub(r'\s+', ' ', text).strip()
