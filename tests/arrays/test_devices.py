"""Tests of the peak FLOP/s of accelerators."""

import pytest

from vit_jax.arrays import devices


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
  assert devices.peak_flops(kind) == teraflops * 1e12


@pytest.mark.parametrize(
  'kind, name',
  [
    ('NVIDIA A100-SXM4-40GB', 'a100-40gb'),
    ('NVIDIA A100-SXM4-80GB', 'a100-80gb'),
    ('NVIDIA A10G', 'a10g'),
    ('NVIDIA L40S', 'l40s'),
    ('NVIDIA L40', None),
    ('Tesla T4', 't4'),
    ('TPU v6 lite', 'v6e'),
    ('cpu', None),
  ],
)
def test_devices_are_found_by_their_names_in_jax(kind, name):
  """The memory in the name distinguishes devices of the same kind."""
  table = devices.TPUS | devices.GPUS
  assert devices.of_kind(kind) == (table[name] if name else None)


@pytest.mark.parametrize('kind', ['cpu', 'TPU v3x', 'TPU v99', 'NVIDIA T4', ''])
def test_unknown_devices_have_no_peak(kind):
  """The result is None instead of a guess."""
  assert devices.peak_flops(kind) is None


@pytest.mark.parametrize(
  'device', [*devices.TPUS.values(), *devices.GPUS.values()]
)
def test_rows_of_the_table_are_plausible(device):
  """Units are FLOP/s, bytes and bytes/s; links are slower than memory."""
  assert (device.tpu is None) != (device.gpu is None)
  assert devices.peak_flops(device.kind) == device.peak_flops
  assert 8e12 < device.peak_flops < 1e16
  assert 7e9 < device.memory_bytes < 1e12
  assert 1e11 < device.bytes_per_s < 1e13
  assert device.network_bytes_per_s < device.link_bytes_per_s
  assert device.link_bytes_per_s < device.bytes_per_s
  assert 5e8 < device.clock_hz < 3e9
