"""Predicts the class of each pixel of photographs, and writes PNG masks."""

import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import PIL.Image
from jaxtyping import Int

from vit_jax.analysis import plotting
from vit_jax.arrays import sharding
from vit_jax.cli.inputs import Request
from vit_jax.config import overrides
from vit_jax.config.schema import build_section
from vit_jax.data.images.decode import decode
from vit_jax.data.storage import files
from vit_jax.errors import UserError
from vit_jax.evaluators import miou
from vit_jax.files import paths
from vit_jax.weights.contract import Pretrained

_KEPT = ('interpolation', 'channels', 'bits')  # keys of the preprocessing


def write(
  source: Pretrained, images: Sequence[str], out: str, request: Request
) -> Iterator[tuple[str, str, str]]:
  """Writes a mask of the size of each image, from sliding windows.

  The value of a pixel is its class, see `encode`.

  Args:
    source: weights of an objective with the result `classes`, such as that of
      `objectives.segment`.
    images: image files.
    out: directory. A mask has the path of its image, relative to the folder
      that contains all images, and ends in .png.
    request: the request, whose settings change the transform `windows`.

  Yields:
    The image, the path of its mask, and '' or the reason why it has none, which
    completes the sentence '{image} …'.

  Raises:
    UserError: two images have the same mask, a mask would replace an image, or
      a mask cannot be written.
  """
  masks = _mask_paths(images, out)
  objective, mesh = source.objective(), sharding.make_mesh(jax.devices()[:1])
  own = source.description.preprocess
  section = {key: own[key] for key in _KEPT if key in own}
  section |= dict(name='windows', classes=objective.classes)
  config = overrides.apply({'preprocess': section}, [*request.settings])
  transform: Any = build_section(config, 'preprocess', source.image_size)
  weights = source.load_weights(mesh)

  @jax.jit
  def predict(weights: Any, batch: Any) -> Any:
    def scores(windows: Any) -> Any:
      want = ('classes',)
      return objective.predict(weights, {'image': windows}, want)['classes']

    return miou.predicted_classes(scores, batch)[0]

  def load(content: bytes) -> tuple[Any, Any]:
    pixels = decode(content, transform.channels, transform.bits)
    # A transform whose size is rounded up, so that few programs are compiled.
    return pixels, transform.fitting(*pixels.shape[:2])

  for path, mask in zip(images, masks, strict=True):
    loaded = files.loaded(path, load)
    if isinstance(loaded, str):
      yield path, mask, loaded
      continue
    pixels, fitting = loaded
    height, width = pixels.shape[:2]
    # Only the shape of the masks is used.
    masks_of_shape = np.zeros(*fitting.spec['segments'])
    example = fitting.views(pixels) | {'segments': masks_of_shape}
    [found] = predict(weights, {key: x[None] for key, x in example.items()})
    classes = np.asarray(found)[:height, :width]
    paths.save(paths.locate(mask), encode(classes, objective.classes))
    yield path, mask, ''


def _mask_paths(images: Sequence[str], out: str) -> list[str]:
  """Returns the path of the mask of each image."""
  absolute = [os.path.abspath(path) for path in images]
  root = os.path.commonpath([os.path.dirname(path) for path in absolute])
  names = [os.path.splitext(os.path.relpath(p, root))[0] for p in absolute]
  if same := {name for name in names if names.count(name) > 1}:
    raise UserError(
      f'{len(same)} masks would have the name of another, such as '
      f'{min(same)}.png: predict these images separately.'
    )
  masks = [f'{out}/{name}.png' for name in names]
  if same := {os.path.abspath(mask) for mask in masks} & {*absolute}:
    raise UserError(
      f'{len(same)} masks would replace images, such as {min(same)}: give '
      'another --out.'
    )
  return masks


def encode(classes: Int[np.ndarray, 'y x'], count: int) -> bytes:
  """Returns a PNG file whose values are the classes.

  Up to 256 classes have a palette of colours; more are grey values of 16 bits.

  Args:
    classes: class of each pixel, from 0.
    count: number of classes.
  """
  file = io.BytesIO()
  if count > len(plotting.class_colours()):
    PIL.Image.fromarray(classes.astype(np.uint16)).save(file, 'png')
    return file.getvalue()
  picture = PIL.Image.fromarray(classes.astype(np.uint8))
  picture.putpalette(plotting.class_colours().tobytes())
  picture.save(file, 'png')
  return file.getvalue()
