"""Determines the hosts, chips and devices of TPU slices and GPU clusters."""

import dataclasses
import math

from vit_jax.arrays.chips import GPUS, parse_gpus
from vit_jax.errors import UserError, closest

_SIDE_2D = ('2x2', '2x4', '4x4', '4x8', '8x8', '8x16', '16x16')
_SIDE_3D = (
  '2x2x1',
  '2x2x2',
  '2x2x4',
  '2x4x4',
  '4x4x4',
  '4x4x8',
  '4x8x8',
  '8x8x8',
  '8x8x12',
  '8x8x16',
  '8x16x16',
  '12x16x16',
  '16x16x16',
  '16x16x24',
)


@dataclasses.dataclass(frozen=True)
class Version:
  """A TPU version, according to Google Cloud's tables of configurations.

  Attributes:
    shapes: shapes of the slices, in chips.
    accelerator: prefix of `--accelerator-type`; None for versions without
      Cloud TPU VMs.
    counts_cores: whether the number in the accelerator type counts cores (two
      per chip) instead of chips.
    cores: number of JAX devices per chip.
    max_chips_per_host: largest number of chips on a single host; each host of a
      larger slice has four chips.
    gke: node label on GKE; None if GKE does not offer the version.
    multislice: whether several slices can train together.
  """

  shapes: tuple[str, ...]
  accelerator: str | None
  counts_cores: bool = False
  cores: int = 1
  max_chips_per_host: int = 4
  gke: str | None = None
  multislice: bool = True


VERSIONS = {
  'v2': Version(_SIDE_2D, 'v2', True, 2, multislice=False),
  'v3': Version(
    (*_SIDE_2D, '16x32', '32x32'),
    'v3',
    True,
    2,
    gke='tpu-v3-slice',
    multislice=False,
  ),
  'v4': Version(_SIDE_3D, 'v4', True, gke='tpu-v4-podslice'),
  'v5e': Version(
    ('1x1', *_SIDE_2D),
    'v5litepod',
    max_chips_per_host=8,
    gke='tpu-v5-lite-podslice',
  ),
  'v5p': Version(_SIDE_3D, 'v5p', True, gke='tpu-v5p-slice'),
  'v6e': Version(
    ('1x1', *_SIDE_2D), 'v6e', max_chips_per_host=8, gke='tpu-v6e-slice'
  ),
  'tpu7x': Version(_SIDE_3D, None, cores=2, gke='tpu7x'),
}


@dataclasses.dataclass(frozen=True)
class Topology:
  """Size of a TPU slice or a GPU cluster.

  Attributes:
    name: name, as the user writes it.
    hosts: number of hosts.
    per_host: number of chips (or GPUs) per host.
    devices: number of JAX devices on all hosts.
    tpu: TPU version; None for GPUs.
  """

  name: str
  hosts: int
  per_host: int
  devices: int
  tpu: Version | None = None

  @property
  def shape(self) -> str:
    """Returns the part of the name after the colon: '4x4' for 'v3:4x4'."""
    return self.name.partition(':')[2]

  @property
  def accelerator_type(self) -> str:
    """Returns the accelerator type in gcloud's notation: v3-32 for v3:4x4.

    Raises:
      UserError: Cloud TPU VMs of this kind do not exist.
    """
    if self.tpu is None or self.tpu.accelerator is None:
      raise UserError(
        f'--topology is {self.name}, which is not offered as a TPU VM; use '
        '--target=gke.'
      )
    chips = self.hosts * self.per_host
    return f'{self.tpu.accelerator}-{chips * (1 + self.tpu.counts_cores)}'


def tpu(name: str) -> Topology:
  """Returns a TPU slice by its name, VERSION:SHAPE, as in `plan`: v3:4x4.

  Raises:
    UserError: the version or the shape is unknown.
  """
  version, _, shape = name.partition(':')
  if version not in VERSIONS:
    names = [f'{v}:{s}' for v in VERSIONS for s in VERSIONS[v].shapes]
    near = closest(name, names).partition('? ')[0]
    hint = f'{near}? ' if near.startswith('did you') else ''
    raise UserError(
      f'--topology is {name!r}; {hint}give VERSION:SHAPE, the shape in chips, '
      f'such as v3:4x4. Versions: {", ".join(VERSIONS)}.'
    )
  spec = VERSIONS[version]
  if shape not in spec.shapes:
    allowed = [f'{version}:{s}' for s in spec.shapes]
    raise UserError(
      f'--topology is {name!r}, which is not a slice; {closest(name, allowed)}.'
    )
  chips = math.prod(int(side) for side in shape.split('x'))
  per_host = chips if chips <= spec.max_chips_per_host else 4
  return Topology(
    name, chips // per_host, per_host, chips * spec.cores, tpu=spec
  )


def gpus(name: str) -> Topology:
  """Returns a GPU cluster by its name, KIND:NODESxGPUS: h100:4x8.

  Raises:
    UserError: the name has another form, or the kind is unknown.
  """
  parsed = parse_gpus(name)
  if parsed is None:
    kind = name.partition(':')[0]
    raise UserError(
      f'--topology is {name!r}; give KIND:NODESxGPUS, such as h100:4x8 for 4 '
      f'nodes with 8 GPUs each. KIND is {kind!r}; {closest(kind, GPUS)}.'
    )
  _, nodes, per_node = parsed
  return Topology(name, nodes, per_node, nodes * per_node)
