"""Files that Pillow writes, and their pixels as Pillow reads them."""

import io

import numpy as np
from PIL import Image, ImageOps
from sample_images import smooth

ORIENTATION = 0x0112  # EXIF tag


def saved(image, kind, **settings):
  """Returns a file written by Pillow."""
  file = io.BytesIO()
  image.save(file, kind, **settings)
  return file.getvalue()


def opened(data):
  """Returns the pixels that Pillow reads, upright."""
  image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
  return np.array(image.convert('RGB'))


def turned(kind, orientation, **settings):
  """Returns a file with an EXIF orientation."""
  image = Image.fromarray(smooth(20, 33))
  exif = image.getexif()
  exif[ORIENTATION] = orientation
  return saved(image, kind, exif=exif, **settings)
