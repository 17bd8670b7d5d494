"""Images whose pixels are given by a formula."""

import cv2
import numpy as np


def noise(height, width, channels=3):
  shape = (height, width, channels) if channels else (height, width)
  return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def encode(rgb, kind):
  """Returns an encoded file of RGB or grey pixels."""
  bgr = rgb[:, :, ::-1] if rgb.ndim == 3 else rgb
  done, data = cv2.imencode(kind, bgr)
  assert done
  return data.tobytes()


def smooth(height, width):
  """Returns RGB with slow ramps, which JPEG keeps nearly exactly."""
  y, x = np.mgrid[:height, :width]
  channels = [40 + 2 * x, 40 + 2 * y, 200 - x - y]
  return np.stack(channels, -1).astype(np.uint8)


def coordinates(height, width):
  """Returns uint8 `[y, x, 3]`: the row, the column, 0; up to 256 of each."""
  y, x = np.mgrid[:height, :width]
  return np.stack([y, x, 0 * x], -1).astype(np.uint8)
