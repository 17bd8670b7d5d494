"""Other projects with which measurements and tests compare this one."""

from typing import Any


def import_timm() -> Any:
  """Imports timm, also if torchvision was built for another torch."""
  import torch

  try:
    import torchvision  # noqa: F401
  except ImportError:
    pass
  except RuntimeError:  # operators are missing, but no model here uses them
    library = torch.library.Library('torchvision', 'DEF')
    for name in ('nms', 'qnms'):
      library.define(f'{name}(Tensor dets, Tensor scores, float t) -> Tensor')
  import timm

  return timm
