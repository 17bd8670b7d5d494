"""What becomes of each step's metrics on the host."""

from unittest import mock

import jax.numpy as jnp
import pytest

from vit_jax.data.reader import BadShare
from vit_jax.errors import UserError
from vit_jax.ledger import Ledger
from vit_jax.metrics import Writer
from vit_jax.recorder import Meter, Recorder
from vit_jax.stragglers import HostTimes
from vit_jax.watchdog import Watchdog


def recorder(bad_share):
  """A recorder that reports to nobody."""
  meter = mock.Mock(spec=Meter, batch_size=8)
  meter.read.return_value = {}
  others = (mock.Mock(spec=kind) for kind in (Writer, Ledger, Watchdog))
  writer, ledger, watchdog = others
  hosts = mock.MagicMock(spec=HostTimes)
  return Recorder(
    *(writer, meter, ledger, watchdog, hosts, bad_share),
    max_skipped=3,
    every_steps=100,
    total_steps=1000,
    steps_per_epoch=8.0,
  )


def test_too_many_bad_records_end_the_run():
  """By what the step summed over all processes, before anything is saved."""
  values = {'skipped': jnp.array(0), 'bad_records': jnp.array(1)}
  taken = recorder(BadShare(0.05, 64))
  for step in range(1, 4):
    taken.append(step, values)
  taken.append(4, values)  # fetches the second: 3 of 64 are allowed
  with pytest.raises(UserError, match='4 times in 32 rows'):
    taken.drain()
  allowed = recorder(BadShare(0.1, 64))
  for step in range(1, 5):
    allowed.append(step, values)
  allowed.drain()
