"""Pre-training of Vision Transformers (arXiv 2010.11929) in JAX."""

import sys
from typing import Any

from vit_jax.processes import (
  interruption as interruption,  # before slower imports
)

__version__ = '0.1.0'

if sys.argv[:1] == ['-m']:  # `python -m vit_jax.NAME`, before NAME is sought
  from vit_jax.cli import commands

  commands.refuse_unknown(sys.orig_argv)


def __getattr__(name: str) -> Any:
  """Imports the public functions when they are first asked for."""
  if name == 'load_pretrained':
    from vit_jax.weights.pretrained import load_pretrained

    return load_pretrained
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
