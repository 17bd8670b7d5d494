"""Tests of the tracker for MLflow, with a double of its client."""

import sys
import types
from unittest import mock

from etils import epath
from minimal_config import completed

from vit_jax.config.completion import flatten
from vit_jax.run import metrics, tracking


def test_mlflow_resumes_its_run(tmp_path, monkeypatch):
  """The run is found by its tag."""
  client = mock.MagicMock()
  info = types.SimpleNamespace(info=types.SimpleNamespace(run_id='r'))
  client.create_run.return_value = info
  client.search_runs.side_effect = [[], [info]]
  entities = types.SimpleNamespace(
    Param=lambda key, value: (key, value),
    Metric=lambda key, value, timestamp, step: (step, key, value),
  )
  package = types.SimpleNamespace(
    MlflowClient=lambda tracking_uri: client, entities=entities
  )
  monkeypatch.setitem(sys.modules, 'mlflow', package)
  monkeypatch.delitem(sys.modules, 'examples.mlflow_tracker', raising=False)
  tracker = dict(
    name='examples.mlflow_tracker', uri='file:here', experiment='e'
  )
  config = completed(
    **{'log.trackers': {'mine': tracker}, 'log.tensorboard': False}
  )
  run = tracking.Run(epath.Path(tmp_path), flatten(config))
  for step in (1, 2):
    settings = metrics.Log(**config.log.to_dict())
    [opened] = tracking.open_trackers(settings, run)
    opened.write(step, {'loss': 0.5 / step})
    opened.close()
  sys.modules.pop('examples.mlflow_tracker', None)
  [created] = client.create_run.call_args_list
  [(tag, identity)] = created.kwargs['tags'].items()
  for call in client.search_runs.call_args_list:
    assert call.kwargs['filter_string'] == f"tags.`{tag}` = '{identity}'"
  parameters, lines = {}, []
  for call in client.log_batch.call_args_list:
    assert call.args == ('r',) and len(call.kwargs.get('params', ())) <= 100
    parameters |= dict(call.kwargs.get('params', ()))
    lines += call.kwargs.get('metrics', ())
  assert parameters.keys() == flatten(config).keys()
  assert parameters['model.depth'] == '2'
  assert lines == [(1, 'loss', 0.5), (2, 'loss', 0.25)]
  assert client.set_terminated.call_count == 2
