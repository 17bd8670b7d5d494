"""Rates and sizes of TPUs and GPUs, from tpus.csv and gpus.csv.

Runs use the peak rates for their MFU, `plan` uses all rates and sizes, and
`launch` what Google Cloud offers.

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
- Slices and their names: Google Cloud's tables of configurations.

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
  H/14 and B/8 (benchmarks/published.py). An RTX 4090 runs above its nominal
  clock, and a data-centre GPU at its power limit below. A100: its best product
  reaches 86 %, that of an H100 80 % (stas00/ml-engineering); FlashAttention-2
  reaches 73 % on an A100 (arXiv 2307.08691) and 35 % on an H100 (arXiv
  2407.08608). B200, T4, A10G, L4, L40S, RTX 3090 and 5090: assumed as related
  GPUs.
- Network: NVIDIA's DGX systems have one adapter of 200 Gbit/s (A100) or 400
  Gbit/s (H100, B200) for each GPU. For the others, 25 Gbit/s for each GPU are
  assumed.
"""

import ast
import csv
import dataclasses
import pathlib
import re
from typing import Any

from vit_jax.errors import UserError

_UNITS = {'KiB': 2**10, 'MiB': 2**20, 'GiB': 2**30, 'GB': 10**9}


@dataclasses.dataclass(frozen=True)
class Device:
  """One JAX device, which is a core on TPU v2, v3 and tpu7x, else a chip.

  Attributes:
    kind: `device.device_kind` in JAX; for GPUs a prefix of it.
    peak_flops: dense bfloat16 FLOP/s that the vendor publishes; those of
      float32 if there is no bfloat16.
    memory: bytes; for TPUs what a program may use; for GPUs the total
      memory as given by the vendor, of which programs can use less.
    bytes_per_s: published memory bandwidth.
    link_bytes_per_s: bandwidth in one direction to the other chips of the slice
      (the sum of all links), or to the other GPUs of the node (NVLink or PCIe).
    network_bytes_per_s: bandwidth in one direction between slices or nodes.
    clock_hz: clock rate of the cores, for GPUs the boost clock; cycles that the
      TPU compiler estimates are those of this clock.
    cores: number of TensorCores of a TPU device, for core-days.
    exponentials_per_cycle: exponentials per cycle in a custom kernel on a TPU,
      including the vector operations that accompany each of them.
    chip_config: option `chip_config_name` of `get_topology_desc` for TPUs; ''
      for the default.
    accelerator: prefix of Google Cloud's accelerator types; '' for TPUs without
      Cloud TPU VMs.
    counted: number that the accelerator type counts per chip: 2 if it counts
      cores, 1 if it counts chips.
    image: default runtime image of the TPU VMs.
    gke: node label on GKE; '' if GKE does not offer the TPU.
    single_host: largest number of chips on a single host; each host of a larger
      slice has four chips.
    shapes: shapes of the slices, in chips, separated by spaces.
    capability: CUDA compute capability, such as 9.0; 0 for TPUs.
    processors: number of streaming multiprocessors of a GPU.
    fpus: float32 units of a multiprocessor.
    threads: maximum number of threads of a multiprocessor.
    l2: bytes of the level-2 cache.
    shared: bytes of the shared memory of a multiprocessor.
    product: fraction of the peak FLOP/s that large matrix products reach on a
      GPU.
    attention: fraction that fused attention reaches with long sequences.
    float32: peak FLOP/s of float32 products, relative to those of bfloat16; by
      default those of TF32, which JAX uses for them.
  """

  kind: str
  peak_flops: float
  memory: int
  bytes_per_s: float
  link_bytes_per_s: float
  network_bytes_per_s: float
  clock_hz: float
  cores: int = 1
  exponentials_per_cycle: float = 0.0
  chip_config: str = ''
  accelerator: str = ''
  counted: int = 1
  image: str = ''
  gke: str = ''
  single_host: int = 4
  shapes: str = ''
  capability: float = 0.0
  processors: int = 0
  fpus: int = 0
  threads: int = 0
  l2: int = 0
  shared: int = 0
  product: float = 0.0
  attention: float = 0.0
  float32: float = 0.5


def _value(text: str) -> Any:
  """Returns the value of a cell: a number, the bytes of '2 GiB', or text."""
  number, _, unit = text.partition(' ')
  if unit in _UNITS:
    return int(float(number) * _UNITS[unit])
  try:
    return ast.literal_eval(text)
  except (SyntaxError, ValueError):
    return text


def _table(file: str) -> dict[str, Device]:
  """Returns the devices of a table by their names."""
  path = pathlib.Path(__file__).with_name(file)
  rows = csv.DictReader(path.read_text().splitlines())
  return {
    row.pop('name'): Device(**{key: _value(row[key]) for key in row})
    for row in rows
  }


TPUS, GPUS = _table('tpus.csv'), _table('gpus.csv')
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
  # Devices of one kind differ in their memory, the end of 'a100-40gb'.
  for name, device in devices.items():
    _, _, memory = name.partition('-')
    if memory.upper() in device_kind:
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
