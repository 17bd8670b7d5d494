"""The device mesh, and the shardings of arrays on it.

The axis `data` splits the batch; `fsdp` splits the batch and the parameters,
which are gathered for use one layer at a time; `model` splits heads and hidden
units (tensor parallelism). Optimizer state and averages are sharded like their
parameter, because rules match only the end of a leaf's path.

`place` and `to_host` copy whole arrays between hosts and devices.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)

from vit_jax.arrays import tree
from vit_jax.config import schema
from vit_jax.errors import UserError

AXES = ('data', 'fsdp', 'model')
BATCH = ('data', 'fsdp')  # the axes over which a batch is split
STACKED = 'layers/'  # paths with this part have a leading layer axis
MIN_FSDP_SIZE = 2**12  # smaller leaves are replicated, to avoid many gathers

# Pairs (regular expression for the end of a path, dimension that the axis
# `model` splits); see models.contract.Model.sharding_rules.
Rules = tuple[tuple[str, int], ...]


@schema.operational('data', 'fsdp', 'model', 'zero1')
def make_mesh(
  devices: Sequence[Any],
  /,
  *,
  data: int = -1,
  fsdp: int = 1,
  model: int = 1,
  zero1: bool = False,
) -> Mesh:
  """Arranges devices in a (data, fsdp, model) mesh.

  With several TPU slices, each slice takes a contiguous part of the data axis,
  so that only the sum of gradients crosses the slow network.

  Args:
    devices: all devices of the run.
    data: number of devices along the axis `data`. One of the three sizes may be
      -1; it is then computed from the number of devices.
    fsdp: number of devices along the axis `fsdp`, or -1.
    model: number of devices along the axis `model`, or -1.
    zero1: whether to split the optimizer's state and averages over `data` too
      (ZeRO-1, arXiv 1910.02054): each device updates its part of the parameters
      and gathers the other parts. `shardings` applies this; the mesh does not
      depend on it.

  Raises:
    UserError: the sizes do not multiply to the number of devices, or the data
      axis cannot span the slices.
  """
  del zero1
  sizes = [data, fsdp, model]
  shape = dict(zip(AXES, sizes, strict=True))
  if sizes.count(-1) == 1:
    known = -int(np.prod(sizes))  # product of the other two sizes
    sizes[sizes.index(-1)] = len(devices) // known if known > 0 else 0
  slices = len({getattr(device, 'slice_index', 0) for device in devices})
  fits = min(sizes) > 0 and np.prod(sizes) == len(devices)
  if not fits or sizes[0] % slices:
    raise UserError(
      f'mesh {shape} does not fit {len(devices)} devices in {slices} slice(s): '
      'the product of its axes must be the number of devices, one axis may be '
      '-1 (the remaining ones), and data must be a multiple of the slices.'
    )
  auto = (AxisType.Auto,) * len(AXES)
  if slices == 1:
    return jax.make_mesh(tuple(sizes), AXES, axis_types=auto, devices=devices)
  grid = mesh_utils.create_hybrid_device_mesh(
    (sizes[0] // slices, *sizes[1:]), (slices, 1, 1), devices
  )
  return Mesh(grid, AXES, axis_types=auto)


def batch_sharding(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of a batch: `data` and `fsdp` split its first axis."""
  return NamedSharding(mesh, PartitionSpec(BATCH))


def replicated(mesh: Mesh) -> NamedSharding:
  """Returns the sharding of an array that is whole on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batch_parts(mesh: Mesh) -> int:
  """Returns the number of parts into which a batch is split."""
  return mesh.shape['data'] * mesh.shape['fsdp']


def random_key(seed: int, mesh: Mesh) -> jax.Array:
  """Returns the random key of a run, replicated on every device."""
  make = jax.jit(lambda: jax.random.key(seed), out_shardings=replicated(mesh))
  return make()


def leaf_spec(
  path: str,
  shape: tuple[int, ...],
  mesh: Mesh | AbstractMesh,
  rules: Rules,
  axes: tuple[str, ...] = ('fsdp',),
) -> PartitionSpec:
  """Returns the partitioning of one leaf.

  The axis `model` follows the rules; the other axes split the largest
  dimensions.

  Args:
    path: path of the leaf. Rules match its end, so moments and averages of a
      parameter are split like the parameter.
    shape: global shape of the leaf.
    mesh: result of `make_mesh`.
    rules: rules of the axis `model`.
    axes: other axes of the mesh; each splits the largest dimension that it
      divides and that is not split yet.
  """
  spec: list[str | None] = [None] * len(shape)
  parts = mesh.shape['model']
  for pattern, dim in rules:
    matches = re.search(rf'(^|/){pattern}$', path) is not None
    if matches and parts > 1 and shape[dim] % parts == 0:
      spec[dim] = 'model'
  first = 1 if STACKED in path else 0  # the layer axis is never split
  if np.prod(shape) < MIN_FSDP_SIZE:
    axes = ()
  for axis in axes:
    free = [
      dim
      for dim in range(first, len(shape))
      if spec[dim] is None and shape[dim] % mesh.shape[axis] == 0
    ]
    if free and mesh.shape[axis] > 1:
      spec[max(free, key=lambda dim: shape[dim])] = axis
  while spec and spec[-1] is None:
    spec.pop()
  return PartitionSpec(*spec)


def shardings(
  abstract: tree.PyTree, mesh: Mesh, rules: Rules, zero1: bool = False
) -> tree.PyTree:
  """Returns a NamedSharding for every leaf.

  Args:
    abstract: arrays or shapes, such as a training state.
    mesh: result of `make_mesh`.
    rules: rules of the axis `model`.
    zero1: whether `opt_state` and `average` are also split over `data`.
  """

  def leaf_sharding(path: str, leaf: Any) -> NamedSharding:
    split = zero1 and re.match(r'(opt_state|average)/', path) is not None
    axes = ('fsdp', 'data') if split else ('fsdp',)
    return NamedSharding(mesh, leaf_spec(path, leaf.shape, mesh, rules, axes))

  return tree.map_with_path(leaf_sharding, abstract)


def with_shardings(
  abstract: tree.PyTree, mesh: Mesh, rules: Rules, zero1: bool = False
) -> tree.PyTree:
  """Returns shapes with their shardings, for restoring and lowering.

  The arguments are those of `shardings`.
  """
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    abstract,
    shardings(abstract, mesh, rules, zero1),
  )


def constrain(array: jax.Array, *spec: Any) -> jax.Array:
  """Constrains the sharding of an array inside jit.

  The mesh is that of the surrounding `jax.set_mesh`; without one, the array is
  returned as it is.

  Args:
    array: traced array.
    *spec: for each dimension, a mesh axis, a tuple of them, or None. Axes that
      do not divide their dimension are left out.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return array
  fitting = _fitting(array.shape, spec, mesh)
  return jax.lax.with_sharding_constraint(array, fitting)


def _fitting(
  shape: tuple[int, ...], spec: tuple[Any, ...], mesh: AbstractMesh
) -> PartitionSpec:
  """Returns a spec without the axes that do not divide their dimension."""

  def fitting(size: int, axes: Any) -> Any:
    names = (axes,) if isinstance(axes, str) else axes or ()
    parts = int(np.prod([mesh.shape[name] for name in names]))
    return axes if size % parts == 0 else None

  return PartitionSpec(*map(fitting, shape, spec))


def constrain_leaves(params: tree.PyTree, rules: Rules) -> tree.PyTree:
  """Constrains parameters, or their gradients, to `leaf_spec` inside jit."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1:
    return params
  return tree.map_with_path(
    lambda path, leaf: jax.lax.with_sharding_constraint(
      leaf, leaf_spec(path, leaf.shape, mesh, rules)
    ),
    params,
  )


def per_device(
  function: Callable[..., Any], arrays: Sequence[jax.Array], *spec: Any
) -> Any:
  """Applies a function to the shards on each device, inside jit.

  Args:
    function: function of arrays; its results are split like its first argument.
    arrays: arguments of the function, all split by `spec`.
    *spec: see `constrain`; without a mesh, it is not used.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return function(*arrays)
  specs = tuple(_fitting(array.shape, spec, mesh) for array in arrays)
  return jax.shard_map(
    function, in_specs=specs, out_specs=specs[0], check_vma=False
  )(*arrays)


def axis_size(name: str) -> int:
  """Returns the number of devices along an axis of `jax.set_mesh`'s mesh.

  The result is 1 without a mesh.
  """
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty else mesh.shape[name]


def device() -> Any:
  """Returns the device that the program is being traced for.

  Returns:
    Abstract device of the mesh, or the default device without a mesh. Both have
    `platform`, such as 'tpu', and `device_kind`, such as 'TPU v3'.
  """
  abstract = jax.sharding.get_abstract_mesh().abstract_device
  return jax.devices()[0] if abstract is None else abstract


def on_tpu() -> bool:
  """Returns whether the program that is being traced is for TPUs."""
  return device().platform == 'tpu'


def on_gpu() -> bool:
  """Returns whether the program that is being traced is for NVIDIA GPUs."""
  return device().platform in ('gpu', 'cuda')


def place(array: np.ndarray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
  """Converts a host array to a global array.

  Args:
    array: whole array, the same on every process.
    leaf: shape, dtype and sharding of the result.
  """
  cast = np.asarray(array, leaf.dtype)
  return jax.make_array_from_callback(
    leaf.shape, leaf.sharding, lambda index: cast[index]
  )


def to_host(array: jax.Array, mesh: Mesh) -> np.ndarray:
  """Returns a whole global array as a NumPy array, on every process.

  Args:
    array: global array.
    mesh: mesh of the devices that hold the array.
  """
  gather = jax.jit(lambda x: x, out_shardings=replicated(mesh))
  return np.asarray(gather(array))
