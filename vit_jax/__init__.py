"""Pre-training of Vision Transformers (arXiv 2010.11929) in JAX.

One line loads trained weights of many projects:

>>> from vit_jax import load_pretrained
>>> model, params = load_pretrained('B_16.npz', image_size=384)
>>> logits = model.apply({'params': params}, images)  # [n, 384, 384, 3]

Images are floats in [-1, 1]. The result also has the preprocessing and the
class names of the weights:

>>> loaded = load_pretrained('runs/quickstart')
>>> image = loaded.preprocess(open('digit.png', 'rb').read())

`python -m vit_jax` lists the commands, such as `python -m vit_jax.train`. All
errors that a user can correct are `vit_jax.UserError`.
"""

import importlib.util
import sys

__version__ = '0.1.0'
__all__ = [
  'UserError',
  'find_pretrained',
  'load_pretrained',
  'read_features',
  'save_pretrained',
]

# `python -m vit_jax.NAME` imports this package before it searches for NAME.
# Only here can signals be handled from the start, and an unknown NAME be
# reported with the list of commands. Programs that import the library are not
# affected.
if '-m' in sys.orig_argv:
  from vit_jax.cli import help

  help.begin(sys.orig_argv)

if importlib.util.find_spec('fcntl') is None:  # as on Windows
  raise ImportError(
    'vit_jax needs Linux or macOS: on Windows, install it in WSL, the Windows '
    'Subsystem for Linux (wsl --install), and use it there.'
  )


from etils import epy  # noqa: E402 (after signals are handled)

# Importing JAX takes seconds, which commands such as `--help` do not need.
with epy.lazy_api_imports(globals()):
  from vit_jax.data.storage.parts import read_features
  from vit_jax.errors import UserError
  from vit_jax.weights.pretrained import find as find_pretrained
  from vit_jax.weights.pretrained import load_pretrained
  from vit_jax.weights.pretrained import save as save_pretrained
