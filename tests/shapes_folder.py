"""Writes folders of images and masks, as `configs/segment.py` reads them."""

import cv2

from examples import shapes


def write(root, count=8):
  """Writes coloured shapes: 0 is the background, 1 circles, 2 squares.

  Args:
    root: path of the folder, with `images/` and `annotations/`.
    count: number of images of each of train and val.
  """
  for split in ('train', 'val'):
    for index, example in enumerate(
      map(shapes.Source(split).__getitem__, range(count))
    ):
      for kind in ('images', 'annotations'):
        (root / kind / split).mkdir(parents=True, exist_ok=True)
      name = f'{split}/{index}.png'
      (root / 'annotations' / name).write_bytes(example['segments'])
      pixels = cv2.cvtColor(example['image'], cv2.COLOR_RGB2BGR)
      cv2.imwrite(str(root / 'images' / name), pixels)
