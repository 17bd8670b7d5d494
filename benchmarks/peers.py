"""Other projects that ours is compared with, in measurements and in tests."""

from typing import Any


def import_timm() -> Any:
  """timm, also where torchvision was built for another torch than this one."""
  import torch

  try:
    import torchvision  # noqa: F401
  except ImportError:
    pass
  except RuntimeError:  # without its operators, which no model here uses
    library = torch.library.Library('torchvision', 'DEF')
    for name in ('nms', 'qnms'):
      library.define(f'{name}(Tensor dets, Tensor scores, float t) -> Tensor')
  import timm

  return timm
