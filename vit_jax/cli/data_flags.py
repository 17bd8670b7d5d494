"""Turns flags into config sections of the data that weights are applied to."""

from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from vit_jax.config import plugins
from vit_jax.config.completion import Config
from vit_jax.config.sections import SECTIONS, build_section
from vit_jax.data.pipeline import stream
from vit_jax.errors import UserError
from vit_jax.evaluators.contract import Setting
from vit_jax.weights.contract import Pretrained

# Keys of the section `reader` that do not depend on the machine.
_POLICY = ('on_bad_record', 'max_bad_share')


def source_section(
  about: dict[str, Any], dataset: str | None, data_dir: str | None
) -> dict[str, Any]:
  """Returns the config section of the data to evaluate on.

  Args:
    about: item `about` of the weights; by default, their data are used.
    dataset: --dataset, a TFDS name or a kind of source.
    data_dir: --data_dir, a directory or path of the data.

  Raises:
    UserError: the flags do not specify the data, or do not fit together.
  """
  section = dict(about.get('source', {'name': 'tfds'}))
  if dataset and _is_source(dataset):
    section = section if dataset == section['name'] else {'name': dataset}
  elif dataset and dataset != section.get('dataset'):
    section = {'name': 'tfds', 'dataset': dataset}
  if data_dir:
    keys = plugins.keys(plugins.resolve(SECTIONS['source'], section['name']))
    path_key = next((key for key in ('data_dir', 'path') if key in keys), None)
    if path_key is None:
      raise UserError(
        f'--data_dir={data_dir} has no effect for the source '
        f'{section["name"]}; give --config.source.KEY=…, with KEY one of '
        f'{", ".join(keys)}.'
      )
    section[path_key] = data_dir
  if section['name'] == 'tfds' and not section.get('dataset'):
    raise UserError(
      '--dataset is missing, because these weights do not contain the data '
      'to evaluate on. Give --dataset=NAME of TFDS (and --split), or '
      '--dataset=folder and --data_dir=DIR.'
    )
  return section


def _is_source(name: str) -> bool:
  """Returns whether a name is a kind of source, and not a TFDS data set."""
  return '.' in name or name in plugins.names(SECTIONS['source'])


def reader_section(about: dict[str, Any]) -> dict[str, Any]:
  """Returns the settings for bad records of the run that wrote the weights."""
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
    mesh: mesh of the devices.
    batch_size: images per batch; rounded up to a multiple of the number of
      devices.
  """
  objective = weights.objective()
  return Setting(
    open_source=open_source,
    transform=build_section(config, 'preprocess', weights.image_size),
    predict=objective.predict,
    num_classes=objective.num_classes,
    mesh=mesh,
    batch_size=-(-batch_size // mesh.size) * mesh.size,
    reader=build_section(config, 'reader'),
  )
