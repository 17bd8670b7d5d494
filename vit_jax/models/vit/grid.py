"""How many patches an image has."""

from vit_jax.errors import UserError


def of_image(
  image_size: tuple[int, int], patch_size: int, stride: int, remainder: str
) -> tuple[int, int]:
  """Rows and columns of patches.

  Args:
    image_size: (height, width), pixels.
    patch_size: side of a patch; in places of a stem's map, if there is a stem.
    stride: pixels for one such place; each halving of the stem rounds up.
    remainder: 'drop' leaves out what does not fill a patch, 'error' refuses it.

  Raises:
    UserError: the patch does not divide the image, or is larger.
  """
  height, width = (-(-side // stride) for side in image_size)
  p, what = patch_size, 'an image of {}x{} pixels'.format(*image_size)
  if stride > 1:
    what = f"the stem's map of {height}x{width} places, of {what},"
  if remainder == 'error' and (height % p or width % p):
    sizes = [(max(height // p, 1) + i) * p for i in (0, 1)]
    raise UserError(
      f'{what} is not divisible by the patch size {p}: take {sizes[0]} or '
      f"{sizes[1]}, or set model.remainder='drop' to leave out the last "
      f'{height % p} rows and {width % p} columns (the VALID convolution of '
      'the official code).'
    )
  if min(height, width) < p:
    raise UserError(f'{what} holds no {p}x{p} patch.')
  return height // p, width // p
