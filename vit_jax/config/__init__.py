"""Configs of runs. This module exports the functions that config files call."""

from vit_jax.config.completion import complete as complete
from vit_jax.config.completion import from_dict as from_dict
from vit_jax.config.completion import parse_arg as parse_arg
from vit_jax.config.schema import Config as Config
