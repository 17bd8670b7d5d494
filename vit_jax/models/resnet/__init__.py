"""BiT's ResNet; a config's `name='resnet'` stands for `Model` here."""

from vit_jax.models.resnet.model import Model as Model
from vit_jax.models.resnet.module import ResNet as ResNet
