"""The Swin Transformer; `name='swin'` in a config selects `Model`."""

from vit_jax.models.swin.swin import Model as Model
from vit_jax.models.swin.swin import Swin as Swin
