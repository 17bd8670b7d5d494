"""The Vision Transformer; `name='vit'` in a config selects `Model`."""

from vit_jax.models.vit.config import Config as Config
from vit_jax.models.vit.vit import Model as Model
from vit_jax.models.vit.vit import ViT as ViT
