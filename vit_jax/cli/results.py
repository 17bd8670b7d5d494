"""Formats the results of commands."""

import json
from typing import Any

from absl import flags

from vit_jax.config.schema import Config
from vit_jax.processes import runtime
from vit_jax.weights.contract import Pretrained


def describe(source: Pretrained, config: Config) -> dict[str, Any]:
  """Returns all settings of the preprocessing of an image.

  Args:
    source: weights.
    config: config with the completed section `preprocess`.
  """
  mean, std = source.description.statistics or source.model().normalization
  return {
    **config.preprocess.to_dict(),
    'image_size': list(source.image_size),
    'mean': list(mean),
    'std': list(std),
  }


def line(description: dict[str, Any]) -> str:
  """Formats a description as one line: 'resize=squash image_size=224,224 …'."""

  def text(value: Any) -> str:
    if isinstance(value, list | tuple):
      return ','.join(map(text, value))
    return f'{value:.6g}' if isinstance(value, float) else str(value)

  return ' '.join(f'{key}={text(value)}' for key, value in description.items())


def print_result(result: dict[str, Any]) -> None:
  """Prints a result, as JSON or in lines, on the main process only.

  Args:
    result: values by name; `preprocess` is a description, see `describe`. Other
      lists and dicts are printed only with --json.
  """
  if not runtime.is_main():
    return
  if flags.FLAGS.json:
    print(json.dumps(result))
    return
  shown = result | {'preprocess': line(result['preprocess'])}
  for name, value in shown.items():
    if not isinstance(value, list | dict):
      text = f'{value:.6g}' if isinstance(value, float) else value
      print(f'{name}: {text}')
