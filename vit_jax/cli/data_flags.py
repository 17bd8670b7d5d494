"""Data that weights are applied to, as flags of a command name it."""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from vit_jax.config import plugins
from vit_jax.config.completion import SECTIONS, Config
from vit_jax.config.sections import build_section
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError
from vit_jax.evaluators.contract import Setting
from vit_jax.weights.contract import Pretrained

_POLICY = ('on_bad_record', 'max_bad_share')  # the rest is up to the machine


def source_section(
  about: dict[str, Any], dataset: str | None, data_dir: str | None
) -> dict[str, Any]:
  """Returns the config section of the data to evaluate on."""
  section = dict(about.get('source', {'name': 'tfds'}))
  if dataset and _is_source(dataset):
    section = section if dataset == section['name'] else {'name': dataset}
  elif dataset and dataset != section.get('dataset'):
    section = {'name': 'tfds', 'dataset': dataset}
  if data_dir:
    keys = plugins.keys(plugins.resolve(SECTIONS['source'], section['name']))
    place = next((key for key in ('data_dir', 'path') if key in keys), None)
    if place is None:
      raise UserError(
        f'--data_dir={data_dir}: the source {section["name"]} has no place of '
        f'its own; set its keys: {", ".join(keys)} (--config.source.KEY=…).'
      )
    section[place] = data_dir
  if section['name'] == 'tfds' and not section.get('dataset'):
    raise UserError(
      '--dataset is missing: these weights do not say what to evaluate on. '
      'Give a TFDS name (and --split), or folder and --data_dir=DIR.'
    )
  return section


def _is_source(name: str) -> bool:
  """Tells whether a name is a kind of source rather than a TFDS data set."""
  return '.' in name or name in plugins.names(SECTIONS['source'])


def reader_section(about: dict[str, Any]) -> dict[str, Any]:
  """Returns the run's settings for bad records."""
  reader = about.get('config', {}).get('reader', {})
  return {key: reader[key] for key in _POLICY if key in reader}


def title(source: Any) -> str:
  """Returns a readable name of the data of a source section."""
  return source.get('dataset') or source.get('path') or source.name


def setting(
  weights: Pretrained,
  config: Config,
  open_source: Callable[[str], stream.Source],
  mesh: Mesh,
  batch_size: int,
) -> Setting:
  """Returns the `Setting` that applies a model to every example of a source.

  Args:
    weights: the model and its parameters.
    config: config with the sections preprocess and reader.
    open_source: function that opens a split.
    mesh: the devices.
    batch_size: images per batch; rounded up to a multiple of the number of
      devices.
  """
  return Setting(
    open_source=open_source,
    transform=build_section(config, 'preprocess', weights.image_size),
    predict=weights.objective().predict,
    num_classes=weights.about['num_classes'],
    mesh=mesh,
    batch_size=-(-batch_size // mesh.size) * mesh.size,
    reader=build_section(config, 'reader'),
  )
