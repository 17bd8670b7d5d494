"""Tests of what a session derives from its config."""

import contextlib
from unittest import mock

import jax
import pytest
from etils import epath
from minimal_config import completed

from vit_jax import finetune
from vit_jax.run import lock
from vit_jax.training import session as session_lib
from vit_jax.training.finished import Progress


def test_the_watchdog_gets_the_limits_of_the_config(tmp_path, monkeypatch):

  class ReachedError(Exception):
    """The watchdog is made; nothing after it matters here."""

  watchdog = mock.Mock(side_effect=ReachedError)
  monkeypatch.setattr(session_lib, 'Watchdog', watchdog)
  limits = {'factor': 7.0, 'min_s': 8.0, 'pause_s': 9.0}
  config = completed(**{f'recovery.watchdog_{k}': v for k, v in limits.items()})
  with contextlib.ExitStack() as stack, pytest.raises(ReachedError):
    session_lib.Session(
      config, epath.Path(tmp_path), Progress(None), stack, False
    )
  assert watchdog.call_args.kwargs == limits
  with lock.hold(epath.Path(tmp_path)):  # the session has released its lock
    assert jax.sharding.get_abstract_mesh().empty


@pytest.mark.parametrize('method', ['aligned', 'bicubic'])
def test_position_resize_reaches_the_transfer(monkeypatch, method):
  transfer, run = mock.Mock(), mock.Mock()
  config = completed(position_resize=method, init_from='there')
  given = mock.Mock(FLAGS=mock.Mock(config=config))
  parts = dict(
    flags=given, transfer=transfer, loop=mock.Mock(run=run), process=mock.Mock()
  )
  parts |= dict(pretrained=mock.Mock())
  parts['process'].run_options.return_value = {}
  parts['process'].prints_config.return_value = False
  parts['adopt_architecture'] = lambda config, source: config
  for name, part in parts.items():
    monkeypatch.setattr(finetune, name, part)
  finetune.main(['finetune'])
  run.call_args.kwargs['initial_params']('experiment')
  source = parts['pretrained'].find.return_value
  transfer.assert_called_once_with(source, 'experiment', method=method)
