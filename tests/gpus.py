"""Programs traced as for a GPU, on a machine without one."""

import pytest

from vit_jax.arrays import sharding
from vit_jax.models.attention import cudnn


@pytest.fixture
def gpu(monkeypatch):
  """Traces as for a GPU; the CPU computes cuDNN's part.

  Returns:
    The shapes of the queries of each call.
  """
  attend = cudnn.attend
  calls = []

  def counted(*arrays, **options):
    calls.append(arrays[0].shape)
    with monkeypatch.context() as patch:
      patch.setattr(sharding, 'on_gpu', lambda: False)
      return attend(*arrays, **options)

  monkeypatch.setattr(sharding, 'on_gpu', lambda: True)
  monkeypatch.setattr(cudnn, 'attend', counted)
  return calls
