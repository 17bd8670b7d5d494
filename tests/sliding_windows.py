"""Reference of segmentation by sliding windows, with PyTorch."""

import numpy as np
import torch
import torch.nn.functional as F

from vit_jax.data.images.decode import resize


def predicted_classes(scores, image, window=32):
  """Averages the scores of windows in a loop, as mmsegmentation does.

  Args:
    scores: function from images `[1, y, x, c]` to scores `[1, rows, columns,
      k]`.
    image: pixels `[y, x, c]`, of any size.
    window: side of a window; windows overlap by a third.

  Returns:
    Class of each pixel, `[y, x]`.
  """
  scale = window / min(image.shape[:2])
  size = [max(round(side * scale), window) for side in image.shape[:2]]
  pixels = resize(image, *size, 'bilinear')
  total, count = 0.0, np.zeros((*size, 1))
  stride = window * 2 // 3
  rows, columns = ([*range(0, s - window, stride), s - window] for s in size)
  for y in rows:
    for x in columns:
      inside = slice(y, y + window), slice(x, x + window)
      cells = torch.tensor(np.asarray(scores(pixels[None][:, *inside])))
      cells = cells.movedim(-1, 1)
      large = F.interpolate(cells, (window, window), mode='bilinear')[0]
      padded = np.zeros((*size, len(large)))
      padded[inside] = large.movedim(0, -1).numpy()
      total = total + padded
      count[inside] += 1
  mean = torch.tensor(total / count).movedim(-1, 0)[None]
  return (
    F.interpolate(mean, image.shape[:2], mode='bilinear')[0].argmax(0).numpy()
  )
