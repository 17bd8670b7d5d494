"""Checks images by decoding them with the code that training uses."""

from vit_jax.data.images.decode import decode
from vit_jax.data.images.headers import DecodeError


def problem(data: bytes) -> str | None:
  """Returns the reason why an encoded image cannot be used; None if it can.

  The format is determined from the content: a PNG file named .JPEG is a PNG
  file.
  """
  try:
    decode(data)
  except DecodeError as error:
    return str(error)
  return None
