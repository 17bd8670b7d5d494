"""Describes files that are not weights of a supported format, for messages."""

from vit_jax.files import paths

PICKLES = ('.pth', '.pt', '.bin', '.pth.tar', '.ckpt')  # endings of PyTorch
SUPPORTED = (
  'Supported: .npz, .safetensors and PyTorch '
  f'({", ".join(PICKLES)}) files, Hugging Face directories, workdirs and '
  'checkpoint step directories'
)
# (first bytes, description)
_SIGNATURES = (
  (b'PK\x03\x04', 'a zip archive, such as a .npz or PyTorch file'),
  (b'\x80', 'a pickle, such as a PyTorch file'),
  (b'\x93NUMPY', 'an .npy file'),
  (b'\x89HDF', 'an HDF5 file, such as weights of Keras'),
  (b'GGUF', 'a GGUF file'),
  (b'\x1f\x8b', 'a gzip archive'),
  (b'version https://git-lfs', 'a Git LFS pointer: run `git lfs pull`'),
  (b'<', 'a web page or XML'),
  (b'{', 'JSON text'),
)


def of_file(path: str) -> str:
  """Returns a sentence about the kind of a file, judging by its first bytes.

  Args:
    path: path of the file, local or gs://.
  """
  with paths.locate(path).open('rb') as file:
    start = file.read(24)
  if not start:
    return 'It is empty.'
  if start[8:9] == b'{':
    return 'It begins like a .safetensors file.'
  for signature, kind in _SIGNATURES:
    if start.startswith(signature):
      return f'It seems to be {kind}.'
  return 'Its first bytes are not those of a known kind of file.'
