"""Finds the devices of a topology such as v3:4x4, and their rates."""

import dataclasses
import importlib.util
import re
from typing import Any

import jax
from jax.experimental import topologies

from vit_jax.arrays import chips, memory
from vit_jax.errors import UserError, closest
from vit_jax.plan import gpus
from vit_jax.plan.environment import LOCAL

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
  """Rates of one JAX device, which is a core on v2, v3 and tpu7x.

  Attributes:
    clock_hz: clock rate of the cores; the compiler's estimates are cycles of
      this clock.
    peak_flops: dense bf16 FLOP/s.
    hbm_bytes: memory that a program may use, according to the compiler's error
      message for a program that is too large.
    hbm_bytes_per_s: published memory bandwidth.
    link_bytes_per_s: bandwidth to other chips of the slice, the sum of all
      links in one direction.
    exponentials_per_cycle: exponentials per cycle in a custom kernel, including
      the vector operations that accompany each of them.
    cores: number of TensorCores of the device, for core-days.
    options: options of `get_topology_desc`.
  """

  clock_hz: float
  peak_flops: float
  hbm_bytes: int
  hbm_bytes_per_s: float
  link_bytes_per_s: float
  exponentials_per_cycle: float
  cores: int = 1
  options: tuple[tuple[str, Any], ...] = ()

  def kernel_cycles(self, flops: float, exponentials: float) -> float:
    """Returns the compute cycles of a custom kernel."""
    products = flops / self.peak_flops * self.clock_hz
    return products + exponentials / self.exponentials_per_cycle


def _chip(kind: str, clock, hbm_gib, hbm, link, exps, **rest: Any) -> Chip:
  peak = chips.peak_flops(kind)
  assert peak is not None, kind
  return Chip(clock, peak, int(hbm_gib * GIB), hbm, link, exps, **rest)


# Device kind, clock, usable HBM (GiB), HBM and link bandwidth (bytes/s),
# exponentials per cycle.
#
# v2, v3: "A Domain-Specific Supercomputer for Training Deep Neural Networks",
#   CACM 63(7), 2020, Table 3: 700 and 940 MHz, 46 and 123 TFLOP/s, 700 and 900
#   GB/s per chip of two cores; four links of 496 and 656 Gbit/s.
# v4: "TPU v4: An Optically Reconfigurable Supercomputer", ISCA 2023, Table 4:
#   1050 MHz, 275 TFLOP/s, 1200 GB/s, six links of 50 GB/s.
# v5e, v5p, v6e, tpu7x: Google Cloud's pages of each version for FLOP/s, HBM and
#   interconnect (given for both directions: halved here). Clocks follow from
#   peak FLOP/s and the matrix units: v5e 4 and v5p 8 of 128x128, v6e and a
#   tpu7x core 4 of 256x256, two FLOPs per cycle; the compiler's estimate of
#   a large product reaches 70 to 97 % of the peak at these clocks on each.
# Exponentials per cycle: chosen so that the attention kernels at 197 tokens
#   cost the cycles that the compiler schedules (benchmarks/kernels.py).
# Usable HBM: from the error message for a program that is too large (libtpu
#   0.0.51).
CHIPS = {
  'v2': _chip('TPU v2', 0.70e9, 7.48, 350e9, 124e9, 1900),
  'v3': _chip('TPU v3', 0.94e9, 15.48, 450e9, 164e9, 80),
  'v4': _chip(
    'TPU v4',
    1.05e9,
    30.75,
    1200e9,
    300e9,
    264,
    cores=2,  # JAX has one device per chip of two cores
    options=(('chip_config_name', 'megacore'),),
  ),
  'v5e': _chip('TPU v5e', 1.50e9, 15.75, 819e9, 200e9, 242),
  'v5p': _chip('TPU v5p', 1.75e9, 95.73, 2765e9, 600e9, 454, cores=2),
  'v6e': _chip('TPU v6e', 1.75e9, 31.24, 1640e9, 400e9, 130),
  'tpu7x': _chip('TPU7x', 2.20e9, 94.74, 3690e9, 300e9, 130),
}
# Bandwidth between slices, one direction: 100 Gbit/s per host of four chips.
SLOW_BYTES_PER_S = {'v2': 12.5e9 / 8, 'v3': 12.5e9 / 8, 'tpu7x': 12.5e9 / 8}
SLOW_BYTES_PER_S_OTHER = 12.5e9 / 4


@dataclasses.dataclass(frozen=True)
class Target:
  """Devices to compile for.

  Attributes:
    name: name, as the user writes it, with the number of slices if there are
      several.
    devices: devices of all slices.
    slices: number of slices, which the data-center network connects.
    chip: rates of a TPU; None for GPUs and for the local backend.
    hbm_bytes: memory of a device that programs may use; None if unknown.
    slow_bytes_per_s: bandwidth per device between slices, in one direction.
    compiles: whether a compiler for the devices is installed.
    cluster: sizes and rates of a GPU cluster; None for other devices.
    sides: sides of a TPU slice in chips, such as (4, 4).
  """

  name: str
  devices: tuple[Any, ...]
  slices: int
  chip: Chip | None
  hbm_bytes: int | None
  slow_bytes_per_s: float = SLOW_BYTES_PER_S_OTHER
  compiles: bool = True
  cluster: gpus.Cluster | None = None
  sides: tuple[int, ...] = ()

  @property
  def is_absent(self) -> bool:
    """True if the devices are not those of this machine."""
    return self.chip is not None or self.cluster is not None


def _version(name: str) -> str:
  """Returns the TPU version in a name: 'v3' for 'v3:4x4'.

  Raises:
    UserError: the name has another form, or the version is unknown.
  """
  match = re.fullmatch(r'(\w+):\d+(?:x\d+){1,2}', name)
  if not match:
    raise UserError(
      f'--topology is {name!r}; give VERSION:SHAPE in chips, such as v3:4x4 or '
      f'v5p:4x4x4, or {LOCAL!r} for this machine (v3-32, a name that counts '
      f'cores, is v3:4x4). Versions: {", ".join(CHIPS)}.'
    )
  if match[1] not in CHIPS:
    supported = [*CHIPS, *gpus.GPUS]
    raise UserError(
      f'--topology is {name!r}, but {match[1]!r} is not a supported TPU or '
      f'GPU; {closest(match[1], supported)}.'
    )
  return match[1]


def find(name: str, slices: int = 1) -> Target:
  """Returns the devices of a topology.

  Args:
    name: 'v3:4x4' (chips), 'h100:4x8' (nodes, GPUs per node), or 'local'.
    slices: number of TPU slices.

  Raises:
    UserError: the topology does not exist, or libtpu is not installed.
  """
  if name == LOCAL:
    return _local(slices)
  if parsed := chips.parse_gpus(name):
    return _gpus(name, slices, *parsed)
  version = _version(name)
  if slices < 1:
    raise UserError(f'--slices is {slices}; it must be at least 1.')
  if importlib.util.find_spec('libtpu') is None:
    raise UserError(
      f'--topology={name} needs the TPU compiler, libtpu, which is not '
      'installed: pip install "vit_jax[plan]" or pip install libtpu, or plan '
      f'for this machine with --topology={LOCAL}.'
    )
  chip = CHIPS[version]
  options = dict(chip.options)
  if slices > 1:
    options['num_slices'] = slices
  try:
    description = topologies.get_topology_desc(
      platform='tpu', topology_name=name, **options
    )
  except (jax.errors.JaxRuntimeError, ValueError) as error:
    first_line = str(error).splitlines()[0]
    raise UserError(
      f'The TPU compiler does not support the topology {name}: {first_line}. '
      'Give the shape in chips, such as v3:4x4 or v4:2x2x2.'
    ) from error
  return Target(
    name=f'{slices} slices of {name}' if slices > 1 else name,
    devices=tuple(description.devices),
    slices=slices,
    chip=chip,
    hbm_bytes=chip.hbm_bytes,
    slow_bytes_per_s=SLOW_BYTES_PER_S.get(version, SLOW_BYTES_PER_S_OTHER),
    sides=tuple(map(int, name.partition(':')[2].split('x'))),
  )


def _local(slices: int) -> Target:
  """Returns the devices of this machine, with their memory limit."""
  if slices != 1:
    raise UserError(f'--topology={LOCAL} is one slice; --slices is {slices}.')
  devices = tuple(jax.local_devices())
  return Target(LOCAL, devices, 1, None, memory.of_device(devices[0]))


def _gpus(
  name: str, slices: int, kind: str, nodes: int, per_node: int
) -> Target:
  """Returns a GPU cluster.

  Without a compiler for GPUs, a CPU device stands for each GPU.
  """
  number = nodes * per_node
  if slices != 1:
    raise UserError(
      f'--slices is {slices}, and --topology={name} is not a TPU slice: give '
      'the number of nodes instead, NODESxGPUS.'
    )
  compiles = gpus.has_compiler()
  if compiles:
    devices = gpus.described_devices(kind, nodes, per_node)
  else:
    devices = jax.devices('cpu')[:number]
  assert len(devices) == number, 'see environment.prepare'
  return Target(
    name,
    tuple(devices),
    slices=1,
    chip=None,
    hbm_bytes=gpus.usable_bytes(kind),
    compiles=compiles,
    cluster=gpus.Cluster(gpus.GPUS[kind], per_node, number),
  )
