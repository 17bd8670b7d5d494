"""Rates and sizes of TPUs and GPUs: the only table of devices.

Runs use the peak rates for their MFU, and `plan` uses all columns. What Google
Cloud offers (slices and their names) is in `launch`, which needs no rates.

Sources for TPUs:
- v2, v3: "A Domain-Specific Supercomputer for Training Deep Neural Networks",
  CACM 63(7), 2020, Table 3: 700 and 940 MHz, 46 and 123 TFLOP/s, 700 and 900
  GB/s per chip of two cores; four links of 496 and 656 Gbit/s.
- v4: "TPU v4: An Optically Reconfigurable Supercomputer", ISCA 2023, Table 4:
  1050 MHz, 275 TFLOP/s, 1200 GB/s, six links of 50 GB/s.
- v5e, v5p, v6e, tpu7x: Google Cloud's pages of each version for FLOP/s, memory
  and interconnect (given for both directions: halved here). Clocks follow from
  peak FLOP/s and the matrix units: v5e 4 and v5p 8 of 128x128, v6e and a tpu7x
  core 4 of 256x256, two FLOPs per cycle; the compiler's estimate of a large
  product reaches 70 to 97 % of the peak at these clocks on each.
- Exponentials per cycle: chosen so that the attention kernels at 197 tokens
  cost the cycles that the compiler schedules (benchmarks/kernels.py).
- Memory: from the error message of the compiler for a program that is too large
  (libtpu 0.0.51).
- Network between slices: 100 Gbit/s per host of four chips.

Sources for GPUs. FLOP/s are without sparsity, with accumulation in float32.
- A100, H100 (SXM), H200, B200 (HGX): memory bandwidth, processors, clock, L2
  and shared memory are those of XLA's own descriptions (openxla/xla,
  xla/backends/gpu/target_config/specs). FLOP/s and NVLink: NVIDIA's white
  papers on the architectures of A100 and H100, and its data sheet of HGX B200.
  NVLink 3, 4 and 5 have 600, 900 and 1,800 GB/s in both directions.
- T4, A10G, L4, L40S, GeForce RTX 3090, 4090 and 5090: NVIDIA's white papers on
  the architectures Turing, Ampere GA102, Ada and Blackwell RTX, and its data
  sheets of T4, A10G, L4 and L40S. They are connected by PCIe 4.0 x16, 64 GB/s
  in both directions, the T4 by PCIe 3.0 x16, 32 GB/s, the RTX 5090 by PCIe 5.0
  x16, 128 GB/s.
- The T4 has no bfloat16 arithmetic. XLA computes it in float32, without tensor
  cores, so the peak rate is that of float32.
- Fractions of the peak: Hopper is fitted to a step of B/16 on an H200
  (benchmarks/measured/h200), RTX 4090 to published inference of B/16, L/16,
  H/14 and B/8 (benchmarks/published.py); it exceeds its nominal clock, and a
  data-centre GPU at its power limit does not reach it. A100: its best product
  reaches 86 %, that of an H100 80 % (stas00/ml-engineering); FlashAttention-2
  reaches 73 % on an A100 (arXiv 2307.08691) and 35 % on an H100 (arXiv
  2407.08608). B200, T4, A10G, L4, L40S, RTX 3090 and 5090: assumed as related
  GPUs.
- Network: NVIDIA's DGX systems have one adapter of 200 Gbit/s (A100) or 400
  Gbit/s (H100, B200) for each GPU. For the others, 25 Gbit/s for each GPU are
  assumed.
"""

import dataclasses
import re
from typing import Any

from vit_jax.errors import UserError

KIB, MIB, GIB = 2**10, 2**20, 2**30
GB = 10**9


@dataclasses.dataclass(frozen=True)
class Tpu:
  """Properties that only TPUs have.

  Attributes:
    exponentials_per_cycle: exponentials per cycle in a custom kernel, including
      the vector operations that accompany each of them.
    cores: number of TensorCores of a JAX device, for core-days.
    options: options of `get_topology_desc`.
  """

  exponentials_per_cycle: float
  cores: int = 1
  options: tuple[tuple[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Gpu:
  """Properties that only GPUs have.

  Attributes:
    capability: CUDA compute capability, (major, minor).
    processors: number of streaming multiprocessors.
    l2_bytes: size of the level-2 cache.
    shared_bytes: shared memory of a multiprocessor.
    product: fraction of the peak FLOP/s that large matrix products reach.
    attention: fraction that fused attention reaches with long sequences.
    float32: peak FLOP/s of float32 products, relative to those of bfloat16; by
      default those of TF32, which JAX uses for them.
  """

  capability: tuple[int, int]
  processors: int
  l2_bytes: int
  shared_bytes: int
  product: float
  attention: float
  float32: float = 0.5


@dataclasses.dataclass(frozen=True)
class Device:
  """One JAX device, which is a core on TPU v2, v3 and tpu7x, else a chip.

  Attributes:
    kind: `device.device_kind` in JAX; for GPUs a prefix of it.
    peak_flops: dense bfloat16 FLOP/s that the vendor publishes; those of
      float32 if there is no bfloat16.
    memory_bytes: for TPUs the memory that a program may use; for GPUs the total
      memory as given by the vendor, of which programs can use less.
    bytes_per_s: published memory bandwidth.
    link_bytes_per_s: bandwidth in one direction to the other chips of the slice
      (the sum of all links), or to the other GPUs of the node (NVLink or PCIe).
    network_bytes_per_s: bandwidth in one direction between slices or nodes.
    clock_hz: clock rate of the cores, for GPUs the boost clock; cycles that the
      TPU compiler estimates are those of this clock.
    tpu: properties of TPUs, or None.
    gpu: properties of GPUs, or None.
  """

  kind: str
  peak_flops: float
  memory_bytes: int
  bytes_per_s: float
  link_bytes_per_s: float
  network_bytes_per_s: float
  clock_hz: float
  tpu: Tpu | None = None
  gpu: Gpu | None = None


_V6E = Tpu(130)
_V5P = Tpu(454, cores=2)
_V4 = Tpu(264, cores=2, options=(('chip_config_name', 'megacore'),))
_A100 = Gpu((8, 0), 108, 40 * MIB, 164 * KIB, 0.86, 0.70)
_HOPPER = Gpu((9, 0), 132, 50 * MIB, 228 * KIB, 0.80, 0.33)
_B200 = Gpu((10, 0), 148, 126 * MIB, 228 * KIB, 0.80, 0.33)
_T4 = Gpu((7, 5), 40, 4 * MIB, 64 * KIB, 0.77, 0.70, float32=1.0)
_A10G = Gpu((8, 6), 80, 6 * MIB, 100 * KIB, 0.77, 0.70)
_L4 = Gpu((8, 9), 58, 48 * MIB, 100 * KIB, 0.77, 0.70)
_L40S = Gpu((8, 9), 142, 96 * MIB, 100 * KIB, 0.77, 0.70)
_RTX3090 = Gpu((8, 6), 82, 6 * MIB, 100 * KIB, 0.90, 0.85)
_RTX4090 = Gpu((8, 9), 128, 72 * MIB, 100 * KIB, 0.90, 0.85)
_RTX5090 = Gpu((12, 0), 170, 96 * MIB, 100 * KIB, 0.90, 0.85)

# Columns: kind, FLOP/s, memory; bandwidths of memory, links and network; clock;
# other properties.
TPUS = {
  'v2': Device(
    'TPU v2', 23e12, int(7.48 * GIB), 350e9, 124e9, 1.5625e9, 0.70e9, Tpu(1900)
  ),
  'v3': Device(
    'TPU v3', 61.5e12, int(15.48 * GIB), 450e9, 164e9, 1.5625e9, 0.94e9, Tpu(80)
  ),
  'v4': Device(
    'TPU v4', 275e12, int(30.75 * GIB), 1200e9, 300e9, 3.125e9, 1.05e9, _V4
  ),
  'v5e': Device(
    'TPU v5e', 197e12, int(15.75 * GIB), 819e9, 200e9, 3.125e9, 1.50e9, Tpu(242)
  ),
  'v5p': Device(
    'TPU v5p', 459e12, int(95.73 * GIB), 2765e9, 600e9, 3.125e9, 1.75e9, _V5P
  ),
  'v6e': Device(
    'TPU v6e', 918e12, int(31.24 * GIB), 1640e9, 400e9, 3.125e9, 1.75e9, _V6E
  ),
  'tpu7x': Device(
    'TPU7x', 1153.5e12, int(94.74 * GIB), 3690e9, 300e9, 1.5625e9, 2.2e9, _V6E
  ),
}
GPUS = {
  'a100-40gb': Device(
    'NVIDIA A100', 312e12, 40 * GIB, 1.555e12, 300e9, 25e9, 1.41e9, gpu=_A100
  ),
  'a100-80gb': Device(
    'NVIDIA A100', 312e12, 80 * GIB, 2.039e12, 300e9, 25e9, 1.41e9, gpu=_A100
  ),
  'h100': Device(
    'NVIDIA H100', 989e12, 80 * GIB, 3.352e12, 450e9, 50e9, 1.98e9, gpu=_HOPPER
  ),
  'h200': Device(
    'NVIDIA H200', 989e12, 141 * GB, 4.8e12, 450e9, 50e9, 1.98e9, gpu=_HOPPER
  ),
  'b200': Device(
    'NVIDIA B200', 2250e12, 180 * GB, 7.672e12, 900e9, 50e9, 1.965e9, gpu=_B200
  ),
  't4': Device(
    'Tesla T4', 8.1e12, 16 * GB, 320e9, 16e9, 3.125e9, 1.59e9, gpu=_T4
  ),
  'a10g': Device(
    'NVIDIA A10G', 70e12, 24 * GB, 600e9, 32e9, 3.125e9, 1.71e9, gpu=_A10G
  ),
  'l4': Device(
    'NVIDIA L4', 121e12, 24 * GB, 300e9, 32e9, 3.125e9, 2.04e9, gpu=_L4
  ),
  'l40s': Device(
    'NVIDIA L40S', 362e12, 48 * GB, 864e9, 32e9, 3.125e9, 2.52e9, gpu=_L40S
  ),
  'rtx3090': Device(
    kind='NVIDIA GeForce RTX 3090',
    peak_flops=71e12,
    memory_bytes=24 * GIB,
    bytes_per_s=936e9,
    link_bytes_per_s=32e9,
    network_bytes_per_s=3.125e9,
    clock_hz=1.695e9,
    gpu=_RTX3090,
  ),
  'rtx4090': Device(
    kind='NVIDIA GeForce RTX 4090',
    peak_flops=165.2e12,
    memory_bytes=24 * GIB,
    bytes_per_s=1.008e12,
    link_bytes_per_s=32e9,
    network_bytes_per_s=3.125e9,
    clock_hz=2.52e9,
    gpu=_RTX4090,
  ),
  'rtx5090': Device(
    kind='NVIDIA GeForce RTX 5090',
    peak_flops=209.5e12,
    memory_bytes=32 * GIB,
    bytes_per_s=1.792e12,
    link_bytes_per_s=64e9,
    network_bytes_per_s=3.125e9,
    clock_hz=2.407e9,
    gpu=_RTX5090,
  ),
}
# Other names that JAX uses for TPUs of the table.
_ALIASES = {
  'TPU v5': 'TPU v5p',
  'TPU v5 lite': 'TPU v5e',
  'TPU v6 lite': 'TPU v6e',
}
# Devices for which only the MFU of a run is computed.
_OTHER_PEAK_FLOPS = {
  'TPU v4 lite': 137e12,
  'NVIDIA H100 PCIe': 756e12,
  'NVIDIA L40': 181e12,
}


def of_kind(device_kind: str) -> Device | None:
  """Returns the device of the table; None if it is unknown (as for CPUs).

  Args:
    device_kind: `device.device_kind` of JAX. For GPUs, a kind of the table may
      be followed by more text, as in 'NVIDIA A100-SXM4-40GB'.
  """
  kind = _known(device_kind)
  devices = {n: d for n, d in (TPUS | GPUS).items() if d.kind == kind}
  for name, device in devices.items():
    if name.partition('-')[2].upper() in device_kind:  # of 'a100-40gb'
      return device
  return next(iter(devices.values()), None)


def peak_flops(device_kind: str) -> float | None:
  """Returns the peak bf16 FLOP/s of a device; None if unknown (as for CPUs).

  Args:
    device_kind: see `of_kind`.
  """
  device = of_kind(device_kind)
  if device is not None:
    return device.peak_flops
  return _OTHER_PEAK_FLOPS.get(_known(device_kind))


def _known(device_kind: str) -> str:
  """Returns the kind in the tables that a name in JAX stands for."""
  kind = _ALIASES.get(device_kind, device_kind)
  if kind.startswith('NVIDIA'):
    kinds = [d.kind for d in GPUS.values()] + [*_OTHER_PEAK_FLOPS]
    kind = max(filter(kind.startswith, kinds), key=len, default=kind)
  return kind


def parse_gpus(name: str) -> tuple[str, int, int] | None:
  """Splits the name of a GPU cluster, such as h100:4x8.

  Args:
    name: topology. That of a GPU cluster is KIND:NODESxGPUS, where KIND is a
      key of `GPUS` and GPUS the number per node.

  Returns:
    Kind, number of nodes, and GPUs per node; None if the kind is not a GPU.

  Raises:
    UserError: the kind is a GPU, but the rest is not NODESxGPUS.
  """
  kind, _, shape = name.partition(':')
  if kind not in GPUS:
    return None
  sides = re.fullmatch(r'([1-9]\d*)x([1-9]\d*)', shape)
  if not sides:
    raise UserError(
      f'--topology is {name!r}; give {kind}:NODESxGPUS, such as {kind}:4x8 for '
      '4 nodes of 8 GPUs.'
    )
  return kind, int(sides[1]), int(sides[2])
