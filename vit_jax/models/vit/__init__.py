"""The Vision Transformer; a config's `name='vit'` stands for `Model` here."""

from vit_jax.models.vit.model import Model as Model
from vit_jax.models.vit.vit import ViT as ViT
