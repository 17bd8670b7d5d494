"""Transforms of images with the tokens of their captions."""

import dataclasses
import json
from typing import Any

import numpy as np
from jaxtyping import Int

from vit_jax.config import schema
from vit_jax.data import tokens as tokens_lib
from vit_jax.data.augment import transforms
from vit_jax.data.contract import Example, Spec, check_fields, check_label
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError, check_choice, check_range

_INTEGERS = np.dtype(np.int32)


@schema.operational('tokenizer')
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Texts:
  """Keys of the transforms: the tokenizer, and where the captions are.

  Attributes:
    tokenizer: file of the tokenizer, see `data.tokens`.
    preset: treatment of texts, 'siglip', 'siglip2' or 'clip'.
    length: tokens of a text; None for that of the preset.
    vocabulary: number of different tokens; None for that of the preset.
    key: key of the caption in an example, a text or a list of them: 'txt' (a
      member of `tar`), 'captions/text' (`tfds`), or the name of a column.
    json_key: key of the caption in a `.json` member, with key='json' (the
      format of img2dataset); '' if the value is the caption itself.
    templates: texts with {} for the name of a class, from which captions are
      made instead, for data with labels.
    classes: names of the classes for `templates`, in the order of the labels.
  """

  tokenizer: str
  preset: str = 'siglip'
  length: int | None = None
  vocabulary: int | None = None
  key: str = 'text'
  json_key: str = ''
  templates: tuple[str, ...] = ()
  classes: tuple[str, ...] = ()

  def __post_init__(self):
    base: Any = super()
    base.__post_init__()
    check_choice('preset', self.preset, tokens_lib.PRESETS)
    check_range('length', self.length, at_least=2)
    check_range('vocabulary', self.vocabulary, at_least=2)
    if bool(self.templates) != bool(self.classes):
      raise UserError(
        f'templates are {self.templates} and classes are {self.classes}: give '
        'both, or neither.'
      )

  @property
  def rules(self) -> tokens_lib.Preset:
    """The preset, with the length and the vocabulary of the keys."""
    preset = tokens_lib.PRESETS[self.preset]
    return preset._replace(
      length=self.length or preset.length,
      vocabulary=self.vocabulary or preset.vocabulary,
    )

  def tokens(self, text: str) -> Int[np.ndarray, ' length']:
    """Returns the tokens of a text, int32.

    Raises:
      UserError: there is no tokenizer, or it has more pieces than `vocabulary`.
    """
    rules = self.rules
    row = tokens_lib.load(self.tokenizer, self.preset)(text, rules.length)
    if row.max() >= rules.vocabulary:
      raise UserError(
        f'{self.tokenizer} has a token {row.max()}, and vocabulary is '
        f'{rules.vocabulary:,}: set vocabulary and objective.text.vocabulary '
        'to the number of its pieces.'
      )
    return row

  def captions(self, example: Example) -> list[str]:
    """Returns all captions of an example.

    Raises:
      DecodeError: there are none, or they are not text; or, for `templates`,
        the label is not one of `classes`.
      UserError: the examples do not have the key, or no label for `templates`.
    """
    if self.templates:
      check_fields(example, 'label')
      check_label(example['label'], len(self.classes))
      name = self.classes[int(example['label'])]
      return [template.format(name) for template in self.templates]
    check_fields(example, self.key)
    content = example[self.key]
    try:
      found = json.loads(content)[self.json_key] if self.json_key else content
      values = [found] if isinstance(found, str | bytes) else list(found)
      texts = [v.decode() if isinstance(v, bytes) else v for v in values]
      texts = [text.strip() for text in texts]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise DecodeError(f'has no caption in {self.key!r}: {error!r}') from error
    if texts := [text for text in texts if text]:
      return texts
    raise DecodeError(f'has no caption in {self.key!r}')


@dataclasses.dataclass(frozen=True)
class TrainTransform(_Texts, transforms.TrainTransform):
  """`transforms.TrainTransform` with the tokens of one random caption."""

  @property
  def spec(self) -> Spec:
    """Spec of the transform, and `tokens`, int32 `[length]`."""
    return super().spec | {'tokens': ((self.rules.length,), _INTEGERS)}

  def __call__(self, example: Example, rng: Any = None) -> dict[str, Any]:
    """Returns image, label and tokens; raises DecodeError for a bad record."""
    texts = self.captions(example)
    values = super().__call__(example, rng)
    text = texts[int(rng.integers(len(texts)))]
    return values | {'tokens': self.tokens(text)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalTransform(_Texts, transforms.EvalTransform):
  """`transforms.EvalTransform`, which also has the tokens of texts.

  Attributes:
    captions_per_image: largest number of captions in a batch, the first ones
      of each image; 0 for images without captions.
  """

  captions_per_image: int = 0

  @property
  def spec(self) -> Spec:
    """Spec of the transform and, with captions, `tokens` and `captions`.

    `tokens` are int32 `[captions_per_image, length]`, of which the first
    `captions`, int32 `[]`, are those of the image; the others are zeros.
    """
    shape = self.captions_per_image, self.rules.length
    own: Spec = {'tokens': (shape, _INTEGERS), 'captions': ((), _INTEGERS)}
    return super().spec | (own if self.captions_per_image else {})

  def __call__(self, example: Example, rng: Any = None) -> dict[str, Any]:
    """Returns image, label and, with captions, the tokens of the first ones.

    Raises:
      DecodeError: the image or the captions cannot be used.
    """
    values, most = super().__call__(example, rng), self.captions_per_image
    if not most:
      return values
    rows = [self.tokens(text) for text in self.captions(example)[:most]]
    padded = np.pad(rows, ((0, most - len(rows)), (0, 0)))
    return values | {'tokens': padded, 'captions': len(rows)}
