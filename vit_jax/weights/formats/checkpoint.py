"""This package's own: workdirs and step directories of checkpoints."""

import functools
import logging
from typing import Any

from vit_jax import checkpoint
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')
PyTree = Any


# Of other programs' weights and models: none of them is a directory's name.
_NOT_WRITTEN = ('.onnx', '.h5', '.hdf5', '.keras', '.msgpack', '.ckpt', '.pb')
_NOT_WRITTEN += ('.tflite', '.npy', '.pkl', '.pickle', '.gguf', '.mlmodel')


def matches(path: str) -> bool:
  """Any path: what no other format takes is a directory of ours, or nothing."""
  del path
  return True


def load(path: str) -> Pretrained:
  """Looks at a step directory, or at a workdir's newest step.

  Raises:
    UserError: no such directory, another format, damage.
  """
  if paths.locate(path).is_file():
    raise UserError(
      f'{path} is a file, and of files .npz, .safetensors, .pth, .pt and .bin '
      'are read: give one, a Hugging Face directory, a workdir or a checkpoint '
      'step directory.'
    )
  step_dir = checkpoint.step_directory(path)
  about = checkpoint.load_about(step_dir)
  if about.get('format') not in checkpoint.READABLE:
    raise UserError(
      f'{step_dir} has the format {about.get("format")!r}, and this version '
      f'reads {checkpoint.READABLE}: use the version of vit_jax that wrote it.'
    )
  log.info('weights from %s', step_dir)
  items = checkpoint.held_items(step_dir)

  def loader(item: str, load: Any) -> Any:
    return functools.partial(load, step_dir) if item in items else None

  return Pretrained(
    str(step_dir),
    about,
    functools.partial(checkpoint.load_params, step_dir),
    load_average=loader('average', checkpoint.load_average),
    load_extra=loader('extra', checkpoint.load_extra),
  )


def save(path: str, params: PyTree, about: dict[str, Any]) -> None:
  """Writes a step directory of parameters alone.

  Raises:
    UserError: the directory exists, or cannot be written, or the path's
      ending promises a format that is not written.
  """
  if path.endswith(_NOT_WRITTEN):
    raise UserError(
      f'{path}: weights are not written as such a file; allowed: .npz, '
      '.safetensors, huggingface:DIR, big_vision:FILE.npz, or a directory '
      'without such an ending. For servers: python -m vit_jax.export.'
    )
  checkpoint.export_params(path, params, about)
