"""The AxialResNet; a config's `name='axial_resnet'` stands for `Model` here."""

from vit_jax.models.axial_resnet.model import Model as Model
from vit_jax.models.axial_resnet.module import AxialResNet as AxialResNet
