"""The Swin Transformer; a config's `name='swin'` stands for `Model` here."""

from vit_jax.models.swin.model import Model as Model
from vit_jax.models.swin.module import Swin as Swin
