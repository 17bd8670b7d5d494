"""Lists the sections of a config, and builds the objects they describe."""

from collections.abc import Callable
from typing import Any

from vit_jax.config import plugins

SECTIONS = {
  'model': 'vit_jax.models.{name}:Model',
  'objective': 'vit_jax.objectives.{name}:Objective',
  'optimizer': 'vit_jax.optim.optimizers:{name}',
  'schedule': 'vit_jax.optim.schedule:make_schedule',
  'source': 'vit_jax.data.sources.{name}:Source',
  'train': 'vit_jax.config.completion:train_data',
  'augment': 'vit_jax.data.augment.{name}:TrainTransform',
  'mix': 'vit_jax.objectives.mixing:DeviceAugment',
  'preprocess': 'vit_jax.data.augment.{name}:EvalTransform',
  'reader': 'vit_jax.data.pipeline.stream:Reader',
  'mesh': 'vit_jax.arrays.sharding:make_mesh',
  'checkpoint': 'vit_jax.checkpoint:Checkpointer',
  'recovery': 'vit_jax.run.recovery:Recovery',
  'log': 'vit_jax.run.metrics:Log',
}
# Default names of sections whose `name` is optional.
DEFAULT_NAMES = {'augment': 'transforms', 'preprocess': 'transforms'}
EVALS = 'vit_jax.evaluators.{name}:Evaluator'
MARKS = {
  section: plugins.Nested(pattern) for section, pattern in SECTIONS.items()
}
MARKS['evals'] = plugins.Nested(EVALS, many=True)


def constructor(section: str, values: Any) -> Callable[..., Any]:
  """Returns the constructor that the values of a section select.

  Args:
    section: name of the section in a config; 'evals' for an evaluator.
    values: dict or config section. Values that an older version wrote may lack
      a name for which there is a default now.

  Raises:
    UserError: the constructor does not exist.
  """
  pattern = EVALS if section == 'evals' else SECTIONS[section]
  if '{name}' not in pattern:
    return plugins.resolve(pattern)
  return plugins.resolve(
    pattern, values.get('name', DEFAULT_NAMES.get(section))
  )


def build(section: str, values: Any, *runtime: Any) -> Any:
  """Builds the object that values describe; see `constructor`."""
  return plugins.build(constructor(section, values), values, *runtime)


def build_section(config: Any, section: str, *runtime: Any) -> Any:
  """Builds the object that a section of a completed config describes."""
  return build(section, config[section], *runtime)
