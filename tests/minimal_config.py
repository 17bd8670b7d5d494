"""A minimal config that tests can change."""

from unittest import mock

from ml_collections import ConfigDict

from vit_jax.config import schema
from vit_jax.config.completion import complete
from vit_jax.config.schema import SECTIONS
from vit_jax.training.experiment import Experiment


def minimal():
  """Returns the required keys of a config as a dict."""
  return dict(
    total='2 epochs',
    batch_size=8,
    image_size=(8, 8),
    num_classes=10,
    source=dict(name='tfds', dataset='cifar10'),
    train=dict(split='train', num_examples=64),
    model=dict(
      name='vit', patch_size=4, width=8, depth=2, mlp_dim=8, num_heads=2
    ),
    objective=dict(name='supervised'),
    optimizer=dict(name='adam'),
    schedule=dict(base_lr=1e-3),
    evals=dict(test=dict(name='classification', split='test')),
  )


def completed(**changes):
  """Returns `minimal` completed, with 'section.key' (or 'key') values changed.

  A value of `...` deletes the key.
  """
  values = minimal()
  for path, value in changes.items():
    *parents, key = path.split('.')
    node = values
    for parent in parents:
      node = node.setdefault(parent, {})
    if value is ...:
      del node[key]
    else:
      node[key] = value
  return complete(ConfigDict(values))


def with_outputs(config):
  """Returns an experiment of which only the number of outputs is built."""
  objective = mock.Mock(num_classes=config.num_classes, classes_key='')
  return mock.Mock(spec=Experiment, config=config, objective=objective)


def sections(config):
  """Yields (section, its keys) of a completed config."""
  for name in SECTIONS:
    yield config[name], schema.MARKS[name].keys(config[name].get('name') or '')
  for section in config.evals.values():
    yield section, schema.MARKS['evals'].keys(section.name)
