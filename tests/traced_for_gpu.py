"""A fixture that traces programs as for a GPU on a machine without one."""

import pytest

from vit_jax.arrays import sharding
from vit_jax.models.attention import cudnn


@pytest.fixture
def gpu(monkeypatch):
  """Traces as for a GPU; the CPU computes cuDNN's part.

  Returns:
    A list of the query shapes of each call.
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
