"""Completes configs by the architecture of the weights that they start from."""

import logging

from vit_jax.config import schema
from vit_jax.config.keys import square
from vit_jax.config.schema import Config
from vit_jax.errors import UserError
from vit_jax.run.resume import formatted
from vit_jax.weights import pretrained
from vit_jax.weights.contract import Pretrained

log = logging.getLogger('vit_jax')


def adopt(config: Config, source: Pretrained) -> Config:
  """Returns the config with the architecture of the weights it starts from.

  `image_size` is reduced to whole patches of the weights, unless the model
  drops the remainder.

  Args:
    config: completed config.
    source: weights that the run starts from.

  Raises:
    UserError: the config specifies another model or another architecture.
  """
  section, loaded = config.model, source.model()
  name = source.description.model['name']
  if section.name != name:
    raise UserError(
      f'{source.path} contains a model {name!r}, but config.model.name is '
      f'{section.name!r}: set --config.model.name={name}, or start python -m '
      'vit_jax.train from these weights, which uses all parameters that fit.'
    )
  keys = schema.config_keys(schema.constructor('model', section))
  # Keys whose default is None, such as sizes: the weights determine them, and a
  # config that contains some of them must agree.
  open_keys = [key for key in keys if keys[key].default is None]
  if any(section[key] is not None for key in open_keys):
    _check_agreement(config, source, open_keys)
  adopted = config.copy_and_resolve_references()
  with adopted.unlocked():
    for key, value in loaded.architecture.items():
      adopted.model[key] = value
    for key, value in loaded.options.items():
      # An option that the config changes keeps its value.
      if section[key] == keys[key].default:
        adopted.model[key] = value
  # The weights also determine keys that have a default, such as `gelu`.
  overridden = {
    f'model.{key}': (value, section[key])
    for key, value in loaded.architecture.items()
    if key not in open_keys and section[key] not in (keys[key].default, value)
  }
  if overridden:
    log.warning(
      '%s determines these keys of the config:%s',
      source.path,
      formatted(overridden, 'in the weights', 'in the config'),
    )
  _fit_images(adopted)
  return adopted


def _check_agreement(
  config: Config, source: Pretrained, open_keys: list[str]
) -> None:
  """Checks that the sizes that a config contains are those of weights.

  Args:
    config: completed config, with a value for at least one of the keys.
    source: weights that the run starts from.
    open_keys: keys of the model's section that the weights determine.

  Raises:
    UserError: they differ; the message lists them.
  """
  section, sizes = config.model, source.model().architecture
  filled = dict(section)
  # A variant, such as B/16, determines all sizes; without one, the sizes that
  # the config leaves open have to be filled in before the model can be built.
  if section.get('variant') is None:
    filled |= {
      key: value
      for key, value in sizes.items()
      if key in open_keys and section[key] is None
    }
  constructor = schema.constructor('model', section)
  built = schema.construct(constructor, filled, config.num_classes)
  differing = [
    f'{key}: {value} in the weights, {built.architecture[key]} in the config'
    for key, value in sizes.items()
    if key in open_keys and built.architecture[key] != value
  ]
  if differing:
    raise UserError(
      f'{source.path} has another architecture: {"; ".join(differing)}. '
      'Leave these keys of config.model out to use that of the weights.'
    )


def complete(config: Config) -> Config:
  """Returns the config, with the model of `init_from` if its own is incomplete.

  A config whose model can be built is returned unchanged.

  Args:
    config: completed config.

  Raises:
    UserError: the model cannot be built, and `init_from` is not set, cannot be
      read or contradicts the config.
  """
  try:
    schema.build_section(config, 'model', config.num_classes)
  except UserError:
    if config.init_from is None:
      raise
    source = pretrained.find(config.init_from, config.init_weights)
    return adopt(config, source)
  return config


def _fit_images(config: Config) -> None:
  """Reduces `image_size` to whole patches, if the model requires them."""
  model = schema.build_section(config, 'model', config.num_classes)
  size = square(tuple(config.image_size))
  try:
    model.check(size)
  except UserError:
    side = getattr(model, 'patch_pixels', 1)
    whole = tuple(pixels - pixels % side for pixels in size)
    if whole == size or not all(whole):
      return  # the check of the run refuses this size, with a message
    log.info(
      'image_size is %s instead of %s, whole patches of %d pixels, as the '
      'weights have',
      whole,
      size,
      side,
    )
    config.image_size = whole
