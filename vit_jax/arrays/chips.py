"""Peak FLOP/s of devices, and memory of GPUs."""

import dataclasses
import re

from vit_jax.errors import UserError

# Peak dense bf16 FLOP/s of one JAX device, by `device.device_kind`. A TPU
# device is a core on v2, v3 and tpu7x, and a chip on other versions. These are
# the figures that the vendors publish.
_PEAK_FLOPS = {
  'TPU v2': 23e12,
  'TPU v3': 61.5e12,
  'TPU v4': 275e12,
  'TPU v4 lite': 137e12,
  'TPU v5 lite': 197e12,
  'TPU v5e': 197e12,
  'TPU v5': 459e12,
  'TPU v5p': 459e12,
  'TPU v6 lite': 918e12,
  'TPU v6e': 918e12,
  'TPU7x': 1153.5e12,
  'NVIDIA A100': 312e12,
  'NVIDIA H100 PCIe': 756e12,
  'NVIDIA H100': 989e12,
  'NVIDIA H200': 989e12,
  'NVIDIA B200': 2250e12,
  'NVIDIA L4': 121e12,
  'NVIDIA L40': 181e12,
  'NVIDIA L40S': 362e12,
  'NVIDIA GeForce RTX 4090': 165.2e12,
}


@dataclasses.dataclass(frozen=True)
class Gpu:
  """A GPU that `plan` and `launch` accept.

  Attributes:
    device_kind: `device.device_kind` in JAX, or a prefix of it.
    memory_bytes: total memory as given by the vendor, in bytes; programs can
      use less.
  """

  device_kind: str
  memory_bytes: int


GPUS = {
  'a100-40gb': Gpu('NVIDIA A100', 40 * 2**30),
  'a100-80gb': Gpu('NVIDIA A100', 80 * 2**30),
  'h100': Gpu('NVIDIA H100', 80 * 2**30),
  'h200': Gpu('NVIDIA H200', 141 * 10**9),
  'b200': Gpu('NVIDIA B200', 180 * 10**9),
  'l4': Gpu('NVIDIA L4', 24 * 10**9),
  'rtx4090': Gpu('NVIDIA GeForce RTX 4090', 24 * 2**30),
}


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


def peak_flops(device_kind: str) -> float | None:
  """Returns the peak bf16 FLOP/s of a device; None if unknown (as for CPUs).

  Args:
    device_kind: `device.device_kind` of JAX. For GPUs, an entry of the table
      may be followed by more text, as in 'NVIDIA A100-SXM4-40GB'.
  """
  if device_kind in _PEAK_FLOPS:
    return _PEAK_FLOPS[device_kind]
  prefixes = [kind for kind in _PEAK_FLOPS if device_kind.startswith(kind)]
  gpu = [kind for kind in prefixes if kind.startswith('NVIDIA')]
  return _PEAK_FLOPS[max(gpu, key=len)] if gpu else None
