"""Tests of the peak FLOP/s of accelerators."""

import pytest

from vit_jax.arrays import chips


@pytest.mark.parametrize(
  'kind, teraflops',
  [
    ('TPU v3', 61.5),
    ('TPU v4', 275),
    ('TPU v5 lite', 197),
    ('TPU v5p', 459),
    ('TPU v6 lite', 918),
    ('NVIDIA A100-SXM4-80GB', 312),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA H100 PCIe MIG 7g.80gb', 756),
    ('NVIDIA H200', 989),
    ('NVIDIA B200', 2250),
    ('NVIDIA L4', 121),
    ('NVIDIA L40', 181),
    ('NVIDIA L40S', 362),
    ('NVIDIA GeForce RTX 4090', 165.2),
  ],
)
def test_peak_flops_of_known_devices(kind, teraflops):
  """Values are the vendors'; names are JAX's, to which GPUs add a suffix."""
  assert chips.peak_flops(kind) == teraflops * 1e12


@pytest.mark.parametrize('kind', ['cpu', 'TPU v3x', 'TPU v99', 'NVIDIA T4', ''])
def test_unknown_devices_have_no_peak(kind):
  """The result is None instead of a guess."""
  assert chips.peak_flops(kind) is None
