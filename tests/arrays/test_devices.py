"""Tests of the tables of accelerators."""

import pytest

from vit_jax.arrays import devices


@pytest.mark.parametrize(
  'kind, name, teraflops',
  [
    ('TPU v3', 'v3', 61.5),
    ('TPU v5 lite', 'v5e', 197),
    ('TPU v5', 'v5p', 459),
    ('TPU v6 lite', 'v6e', 918),
    ('NVIDIA A100-SXM4-40GB', 'a100-40gb', 312),
    ('NVIDIA A100-SXM4-80GB', 'a100-80gb', 312),
    ('NVIDIA A10G', 'a10g', 70),
    ('NVIDIA H100 80GB HBM3', 'h100', 989),
    ('NVIDIA H100 PCIe MIG 7g.80gb', None, 756),
    ('NVIDIA L4', 'l4', 121),
    ('NVIDIA L40', None, 181),
    ('NVIDIA L40S', 'l40s', 362),
    ('Tesla T4', 't4', 8.1),
    *((kind, None, None) for kind in ('cpu', 'TPU v3x', 'NVIDIA T4', '')),
  ],
)
def test_devices_are_found_by_their_names_in_jax(kind, name, teraflops):
  """JAX adds text to the names of GPUs; rates are the vendors'.

  The result is None instead of a guess.
  """
  table = devices.TPUS | devices.GPUS
  assert devices.of_kind(kind) == (table[name] if name else None)
  assert devices.peak_flops(kind) == (teraflops and teraflops * 1e12)


@pytest.mark.parametrize(
  'device', [*devices.TPUS.values(), *devices.GPUS.values()]
)
def test_rows_of_the_table_are_plausible(device):
  """Units are FLOP/s, bytes and bytes/s; links are slower than memory."""
  assert (device.capability > 0) != (device.exponentials_per_cycle > 0)
  assert devices.peak_flops(device.kind) == device.peak_flops
  assert 8e12 < device.peak_flops < 1e16
  assert 7e9 < device.memory < 1e12
  assert 1e11 < device.bytes_per_s < 1e13
  assert device.network_bytes_per_s < device.link_bytes_per_s
  assert device.link_bytes_per_s < device.bytes_per_s
  assert 5e8 < device.clock_hz < 3e9
