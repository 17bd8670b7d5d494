"""Tokens of texts, by a tokenizer file of another project.

A `.json` file is one of Hugging Face's package `tokenizers`, any other file a
model of SentencePiece. A tokenizer divides a text into pieces; the number of a
piece in the tokenizer's vocabulary is a token.
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
    vocabulary: number of pieces in the vocabulary.
    length: number of tokens per text, including the added ones.
    pieces: pieces that are added to a text: (end, padding) or (start, end,
      padding). `start` precedes the text, `end` follows it, also if the text is
      cut, and `padding` fills the remaining length.
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
# All three use lower case. SigLIP pads with its end piece. So does CLIP, whose
# text tower returns the features at the first end piece and ignores the rest.
PRESETS = {
  'siglip': Preset(32_000, 64, ('</s>', '</s>'), _SIGLIP),
  'siglip2': Preset(256_000, 64, ('<eos>', '<pad>'), _SIGLIP2),
  'clip': Preset(49_408, 77, _CLIP_PIECES, _CLIP),
}


@functools.lru_cache(maxsize=4)
def load(path: str, preset: str) -> Callable[[str, int], Any]:
  """Reads a tokenizer file.

  Args:
    path: path of the file, local or on gs://.
    preset: key of `PRESETS`.

  Returns:
    Function of a text and a length. It returns the tokens of the text, int32
    `[length]`, cut or padded to the length.

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
  *start, end, padding = added  # `start` is a list of one token or none

  def tokens(text: str, length: int) -> Int[np.ndarray, ' length']:
    before_end = [*start, *encode(text.lower())][: length - 1]
    row = np.full(length, padding, np.int32)
    row[: len(before_end) + 1] = [*before_end, end]
    return row

  return tokens


def _huggingface_tokenizer(package: Any, content: bytes) -> tuple[Any, Any]:
  """Returns two functions of a tokenizer.

  The first returns the tokens of a text, without added pieces; the second the
  token of a piece, or None if the vocabulary does not contain the piece.
  """
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
  """Returns the words of a text in lower case, joined by single blanks.

  Punctuation is removed; underscores separate words.
  """
  words = text.replace('_', ' ').lower().translate(_PUNCTUATION).split()
  return ' '.join(words)
