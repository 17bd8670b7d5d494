"""Files that Pillow writes, and what it reads in them."""

import io

import numpy as np
from pictures import smooth
from PIL import Image, ImageOps

ORIENTATION = 0x0112  # EXIF tag


def saved(image, kind, **settings):
  """A file that Pillow writes."""
  file = io.BytesIO()
  image.save(file, kind, **settings)
  return file.getvalue()


def opened(data):
  """The pixels that Pillow reads, upright."""
  image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
  return np.array(image.convert('RGB'))


def turned(kind, orientation, **settings):
  """A file that says it has to be turned."""
  image = Image.fromarray(smooth(20, 33))
  exif = image.getexif()
  exif[ORIENTATION] = orientation
  return saved(image, kind, exif=exif, **settings)
