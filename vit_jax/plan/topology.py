"""Finds the devices to compile for: v3:4x4, h100:4x8 or this machine.

XLA's description of a GPU is a `GpuTargetConfigProto`. The compiler for GPUs is
part of JAX's CUDA plug-in, and that for TPUs is libtpu; both are optional
extras.
"""

import dataclasses
import importlib.util
import pathlib
import re
import string
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies

from vit_jax.arrays import memory
from vit_jax.arrays.devices import GPUS, TPUS, Device, of_kind, parse_gpus
from vit_jax.errors import UserError, check_range, closest
from vit_jax.plan import environment
from vit_jax.plan.environment import GPU_EXTRA, LOCAL
from vit_jax.processes import machine

_GPU_TARGET = pathlib.Path(__file__).with_name('gpu_target.txt')


@dataclasses.dataclass(frozen=True)
class Target:
  """Devices to compile for.

  Attributes:
    name: name, as the user writes it, with the number of slices if there are
      several.
    devices: devices of all slices.
    device: rates and sizes of each device; None if they are unknown.
    slices: number of TPU slices or GPU nodes, which a network connects.
    hbm_bytes: memory of a device that programs may use; None if unknown.
    sides: sides of a TPU slice in chips, such as (4, 4).
  """

  name: str
  devices: tuple[Any, ...]
  device: Device | None = None
  slices: int = 1
  hbm_bytes: int | None = None
  sides: tuple[int, ...] = ()

  @property
  def on_gpus(self) -> bool:
    """True if the devices are GPUs."""
    return self.device is not None and self.device.capability > 0

  @property
  def is_local(self) -> bool:
    """True if the devices are those of this machine."""
    return self.name == LOCAL


def find(name: str, slices: int = 1) -> Target:
  """Returns the devices of a topology.

  Args:
    name: 'v3:4x4' (chips), 'h100:4x8' (nodes, GPUs per node), or 'local'.
    slices: number of TPU slices.

  Raises:
    UserError: the topology does not exist, or its compiler is not installed.
  """
  gpus = parse_gpus(name)
  if slices != 1 and (name == LOCAL or gpus):
    raise UserError(
      f'--slices is {slices}, but --topology={name} is one slice; give the '
      'number of GPU nodes in --topology, as in h100:4x8.'
    )
  if name == LOCAL:
    devices = tuple(jax.local_devices())
    device = of_kind(devices[0].device_kind)
    limit = memory.of_device(devices[0])
    return Target(LOCAL, devices, device, hbm_bytes=limit)
  if gpus:
    return _gpus(name, *gpus)
  version, _, shape = name.partition(':')
  if version not in TPUS or not re.fullmatch(r'\d+(x\d+){1,2}', shape):
    hint = f' The version is {version!r}; {closest(version, [*TPUS, *GPUS])}.'
    raise UserError(
      f'--topology is {name!r}; give VERSION:SHAPE in chips (v3-32, which '
      f'counts cores, is v3:4x4), GPUs such as h100:4x8, or {LOCAL!r}.'
      f'{"" if version in TPUS else hint}'
    )
  check_range('--slices', slices, at_least=1)
  if importlib.util.find_spec('libtpu') is None:
    raise UserError(
      f'--topology={name} needs the TPU compiler: pip install "vit_jax[plan]".'
    )
  device = TPUS[version]
  options: dict[str, Any] = {'num_slices': slices} if slices > 1 else {}
  if device.chip_config:
    options['chip_config_name'] = device.chip_config
  return Target(
    f'{slices} slices of {name}' if slices > 1 else name,
    _described('tpu', name, options),
    device,
    slices,
    device.memory,
    sides=tuple(map(int, shape.split('x'))),
  )


def _described(
  platform: str, name: str, options: Mapping[str, Any]
) -> tuple[Any, ...]:
  """Returns descriptions of absent devices to compile for.

  Raises:
    UserError: the compiler does not support the devices.
  """
  try:
    description = topologies.get_topology_desc(
      platform=platform, topology_name=name, **options
    )
  except Exception as error:  # its type depends on the compiler's version
    advice = 'Give the shape in chips, such as v3:4x4 or v4:2x2x2.'
    if platform == 'cuda':
      advice = f'Install the version for the installed JAX: {GPU_EXTRA}.'
    reason = str(error).splitlines()[0]
    raise UserError(f'{name} is not supported: {reason}. {advice}') from error
  return tuple(description.devices)


def _gpus(name: str, kind: str, nodes: int, per_node: int) -> Target:
  """Returns a GPU cluster.

  Raises:
    UserError: the compiler for GPUs is not installed.
  """
  if not environment.has_gpu_compiler():
    raise UserError(f'--topology={name} needs the GPU compiler: {GPU_EXTRA}.')
  device = GPUS[kind]
  options = {
    'topology': f'1x{nodes}x{per_node}',  # slices, hosts, GPUs of a host
    'target_config': target_config(device),
  }
  devices = _described('cuda', kind, options)
  usable = int(device.memory * machine.GPU_MEMORY_FRACTION)
  return Target(name, devices, device, nodes, usable)


def target_config(device: Device) -> str:
  """Returns XLA's description of a GPU, a GpuTargetConfigProto as text."""
  major, minor = str(device.capability).split('.')
  template = string.Template(_GPU_TARGET.read_text())
  return template.substitute(
    vars(device),
    bandwidth=f'{device.bytes_per_s:.0f}',
    clock=f'{device.clock_hz / 1e9:g}',
    optin=device.shared - 1024,  # CUDA reserves 1 KiB for each block
    major=major,
    minor=minor,
  )
