"""Tests of the memory limits of a machine and of control groups."""

import pathlib

import pytest

from vit_jax.processes import machine


def meminfo() -> int:
  """Returns the total memory according to /proc/meminfo."""
  return int(pathlib.Path('/proc/meminfo').read_text().split()[1]) * 1024


@pytest.mark.parametrize(
  ('groups', 'files', 'expected'),
  [
    (None, {}, None),  # a machine without control groups
    ('', {}, None),
    ('0::/\n', {'memory.max': 'max'}, None),
    ('0::/\n', {'memory.max': '1000000'}, 10**6),
    # A batch system: a step within a job whose limit is lower.
    (
      '0::/slurm/job/step\n',
      {'slurm/job/memory.max': '3000', 'slurm/job/step/memory.max': '4000'},
      3000,
    ),
    # A container that sees its own group as the root.
    ('0::/docker/7f\n', {'memory.max': '5000'}, 5000),
    # Version 1, without a limit, and with one.
    (
      '9:name=systemd:/\n4:memory:/a\n',
      {'memory/a/memory.limit_in_bytes': str(2**63 - 4096)},
      None,
    ),
    (
      '5:cpu:/b\n4:hugetlb,memory:/a\n0::/\n',
      {
        'memory/a/memory.limit_in_bytes': '6000',
        'memory/b/memory.limit_in_bytes': '1',
      },
      6000,
    ),
  ],
)
def test_memory_is_the_smallest_limit(
  groups, files, expected, tmp_path, monkeypatch
):
  """Limits of control groups and their parents count."""
  own = tmp_path / 'own'
  if groups is not None:
    own.write_text(groups)
  for name, text in files.items():
    path = tmp_path / 'groups' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + '\n')
  monkeypatch.setattr(machine, '_CGROUPS_OF_PROCESS', own)
  monkeypatch.setattr(machine, '_CGROUPS', tmp_path / 'groups')
  assert machine.memory_bytes() == (expected or meminfo())
