"""Describes GPUs, so that XLA can compile for GPUs that are not present.

The description of a GPU is a `GpuTargetConfigProto`. The compiler is part of
JAX's CUDA plug-in, an optional extra. Without the plug-in, a plan contains only
the bytes of training state and batch, and the time at the peak rate.
"""

import dataclasses
import importlib.util
from typing import Any, NamedTuple

from vit_jax.arrays import chips
from vit_jax.errors import UserError
from vit_jax.processes import backends

EXTRA = "pip install 'vit_jax[plan-gpu]'"
# Without a GPU, XLA cannot time kernels to select the best one (autotuning).
# Triton's matrix products need tile sizes that autotuning selects, so cuBLAS is
# used, which selects its kernels itself.
COMPILER_OPTIONS = {
  'xla_gpu_autotune_level': '0',
  'xla_gpu_enable_triton_gemm': False,
}


@dataclasses.dataclass(frozen=True)
class Gpu:
  """Rates and sizes of one GPU, from the vendor's data sheets.

  Attributes:
    peak_flops: dense bfloat16 FLOP/s.
    bytes_per_s: memory bandwidth.
    link_bytes_per_s: bandwidth of NVLink (or PCIe) to the other GPUs of the
      node, in one direction.
    network_bytes_per_s: bandwidth of the network adapter of each GPU in the
      vendor's 8-GPU systems, in one direction.
    capability: CUDA compute capability, (major, minor).
    processors: number of streaming multiprocessors.
    clock_ghz: boost clock.
    l2_bytes: size of the level-2 cache.
    shared_bytes: shared memory of a multiprocessor.
  """

  peak_flops: float
  bytes_per_s: float
  link_bytes_per_s: float
  network_bytes_per_s: float
  capability: tuple[int, int]
  processors: int
  clock_ghz: float
  l2_bytes: int
  shared_bytes: int


class Cluster(NamedTuple):
  """Nodes with GPUs of one kind.

  Attributes:
    gpu: rates and sizes of each GPU.
    per_node: number of GPUs of a node, which NVLink or PCIe connects.
    devices: number of GPUs of all nodes.
  """

  gpu: Gpu
  per_node: int
  devices: int


# Sources. FLOP/s are bfloat16 without sparsity, with accumulation in float32.
#
# A100, H100 (SXM), H200, B200 (HGX): memory bandwidth, processors, clock, L2
#   and shared memory are those of XLA's own descriptions (openxla/xla,
#   xla/backends/gpu/target_config/specs). FLOP/s and NVLink: NVIDIA's white
#   papers on the architectures of A100 and H100, and its data sheet of HGX
#   B200. NVLink 3, 4 and 5 have 600, 900 and 1,800 GB/s in both directions.
# L4, GeForce RTX 4090: NVIDIA's white paper "Ada GPU Architecture" and its data
#   sheet of L4. They are connected by PCIe 4.0 x16, 64 GB/s in both directions.
# Network: NVIDIA's DGX systems have one adapter of 200 Gbit/s (A100) or 400
#   Gbit/s (H100, B200) for each GPU. For L4 and RTX 4090, 25 Gbit/s for each
#   GPU are assumed.
_A100 = Gpu(
  peak_flops=312e12,
  bytes_per_s=1.555e12,
  link_bytes_per_s=300e9,
  network_bytes_per_s=25e9,
  capability=(8, 0),
  processors=108,
  clock_ghz=1.41,
  l2_bytes=40 * 2**20,
  shared_bytes=164 * 2**10,
)
_H100 = Gpu(
  peak_flops=989e12,
  bytes_per_s=3.352e12,
  link_bytes_per_s=450e9,
  network_bytes_per_s=50e9,
  capability=(9, 0),
  processors=132,
  clock_ghz=1.98,
  l2_bytes=50 * 2**20,
  shared_bytes=228 * 2**10,
)
_L4 = Gpu(
  peak_flops=121e12,
  bytes_per_s=300e9,
  link_bytes_per_s=32e9,
  network_bytes_per_s=25e9 / 8,
  capability=(8, 9),
  processors=58,
  clock_ghz=2.04,
  l2_bytes=48 * 2**20,
  shared_bytes=100 * 2**10,
)
GPUS = {
  'a100-40gb': _A100,
  'a100-80gb': dataclasses.replace(_A100, bytes_per_s=2.039e12),
  'h100': _H100,
  'h200': dataclasses.replace(_H100, bytes_per_s=4.8e12),
  'b200': Gpu(
    peak_flops=2250e12,
    bytes_per_s=7.672e12,
    link_bytes_per_s=900e9,
    network_bytes_per_s=50e9,
    capability=(10, 0),
    processors=148,
    clock_ghz=1.965,
    l2_bytes=126 * 2**20,
    shared_bytes=228 * 2**10,
  ),
  'l4': _L4,
  'rtx4090': dataclasses.replace(
    _L4,
    peak_flops=165.2e12,
    bytes_per_s=1.008e12,
    processors=128,
    clock_ghz=2.52,
    l2_bytes=72 * 2**20,
  ),
}


def has_compiler() -> bool:
  """Returns whether JAX's CUDA plug-in is installed."""
  return any(
    importlib.util.find_spec(f'jax_cuda{version}_plugin') is not None
    for version in (12, 13)
  )


def described_devices(kind: str, nodes: int, per_node: int) -> list[Any]:
  """Returns descriptions of GPUs to compile for.

  Args:
    kind: key of `GPUS`.
    nodes: number of nodes.
    per_node: number of GPUs per node.

  Raises:
    UserError: the CUDA plug-in cannot describe these GPUs.
  """
  # Imported here because `environment` sets variables before JAX is imported.
  from jax.experimental import topologies

  try:
    description = topologies.get_topology_desc(
      platform='cuda',
      topology_name=kind,
      topology=f'1x{nodes}x{per_node}',  # slices, hosts, GPUs of a host
      target_config=target_config(kind),
    )
  except Exception as error:  # its type depends on the version of the plug-in
    first_line = str(error).splitlines()[0]
    raise UserError(
      f"JAX's CUDA plug-in cannot describe {kind}: {first_line}. Install the "
      f'version that belongs to the installed JAX: {EXTRA}.'
    ) from error
  return list(description.devices)


def usable_bytes(kind: str) -> int:
  """Returns the memory of a GPU that JAX uses in training, in bytes."""
  return int(chips.GPUS[kind].memory_bytes * backends.GPU_MEMORY_FRACTION)


def target_config(kind: str) -> str:
  """Returns XLA's description of a GPU, a GpuTargetConfigProto as text."""
  gpu, chip = GPUS[kind], chips.GPUS[kind]
  major, minor = gpu.capability
  return f"""
    gpu_device_info {{
      threads_per_block_limit: 1024
      threads_per_warp: 32
      shared_memory_per_block: 49152
      shared_memory_per_core: {gpu.shared_bytes}
      threads_per_core_limit: {1536 if gpu.capability == (8, 9) else 2048}
      core_count: {gpu.processors}
      fpus_per_core: {64 if gpu.capability == (8, 0) else 128}
      block_dim_limit_x: 2147483647
      block_dim_limit_y: 65535
      block_dim_limit_z: 65535
      memory_bandwidth: {gpu.bytes_per_s:.0f}
      l2_cache_size: {gpu.l2_bytes}
      clock_rate_ghz: {gpu.clock_ghz}
      device_memory_size: {chip.memory_bytes}
      shared_memory_per_block_optin: {gpu.shared_bytes - 1024}
      cuda_compute_capability {{ major: {major} minor: {minor} }}
      registers_per_core_limit: 65536
      registers_per_block_limit: 65536
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 8 }}
    device_description_str: "{chip.device_kind}"
  """
