"""Tests of process settings before training."""

from unittest import mock

import jax
import pytest

from tests import cli
from vit_jax.errors import UserError
from vit_jax.processes import peers, runtime


@pytest.mark.parametrize(
  'backend, given, expected',
  [
    ('cpu', None, None),
    ('tpu', None, '/lab/project/.cache/vit_jax/compiled'),
    ('gpu', None, '/lab/project/.cache/vit_jax/compiled'),
    ('tpu', '/given', '/given'),
  ],
)
def test_compilation_cache(monkeypatch, backend, given, expected):
  """The cache is used on accelerators; the user can choose its directory."""
  monkeypatch.setattr(jax, 'default_backend', lambda: backend)
  monkeypatch.setenv('HOME', '/lab/project')
  before = jax.config.jax_compilation_cache_dir
  jax.config.update('jax_compilation_cache_dir', given)
  try:
    runtime.cache_compilations()
    assert jax.config.jax_compilation_cache_dir == expected
  finally:
    jax.config.update('jax_compilation_cache_dir', before)


UNSUPPORTED = {
  'jax_enable_x64': True,
  'jax_disable_jit': True,
  'jax_numpy_rank_promotion': 'raise',
  'jax_numpy_dtype_promotion': 'strict',
  'jax_no_tracing': True,
  'jax_no_execution': True,
  'jax_transfer_guard': 'disallow',
  'jax_random_seed_offset': 1,
}


@pytest.mark.slow
def test_a_run_ignores_settings_that_it_does_not_support(tmp_path, monkeypatch):
  """The numbers are those without the settings, and the log names each."""
  expected = cli.losses(cli.reference())
  for name, value in UNSUPPORTED.items():
    monkeypatch.setenv(name.upper(), str(value))
  _, err = cli.run(cli.train_command(tmp_path / 'run'))
  for name, value in UNSUPPORTED.items():
    assert f'{name.upper()}={value} is ignored' in err
  assert cli.losses(tmp_path / 'run') == expected


@pytest.mark.parametrize(
  'flags, words',
  [
    ((None, 2, 1), '--coordinator_address=None'),
    ((None, None, 1), '--process_id=1'),
    (('host:1', 0, 0), '--num_processes is 0'),
    (('host:1', 2, 2), '--process_id is 2'),
    (('host', 2, 1), '--coordinator_address=host,'),
    (('host:1', 2, None), '--process_id=None'),
  ],
)
def test_incomplete_process_flags_are_refused(monkeypatch, flags, words):
  """JAX would run alone silently, wait without end, or raise a traceback."""
  monkeypatch.setattr(jax.distributed, 'initialize', pytest.fail)
  with pytest.raises(UserError, match=words):
    runtime.start_distributed(*flags)


def test_a_single_process_does_not_initialize_jax_distributed(monkeypatch):
  """That is the case without flags, and with those of an only process."""
  monkeypatch.setattr(jax.distributed, 'initialize', pytest.fail)
  for flags in ((), (None, 1, 0), (None, None, 0)):
    assert not runtime.start_distributed(*flags)


def test_process_flags_reach_jax_distributed(monkeypatch):
  """Under SLURM, JAX finds the processes itself."""
  calls = []
  monkeypatch.setattr(
    jax.distributed, 'initialize', lambda *given, **_: calls.append(given)
  )
  runtime.start_distributed('host:1', 2, 1)
  monkeypatch.setenv('SLURM_NTASKS', '2')
  runtime.start_distributed('host:1')
  assert calls == [('host:1', 2, 1), ('host:1', None, None)]


def test_processes_that_do_not_connect_are_one_message(monkeypatch):
  """JAX raises an error without the cause; launchers start again."""
  failing = mock.Mock(side_effect=RuntimeError('std::bad_cast'))
  monkeypatch.setattr(jax.distributed, 'initialize', failing)
  with pytest.raises(ConnectionError, match='within 300 s') as error:
    runtime.start_distributed('host:1', 3, 0)
  monkeypatch.setattr(peers, 'client', lambda: object())
  assert peers.is_lost_peer(error.value)
