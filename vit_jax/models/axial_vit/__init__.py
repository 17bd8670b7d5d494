"""The Axial-ViT; a config's `name='axial_vit'` stands for `Model` here."""

from vit_jax.models.axial_vit.model import Model as Model
from vit_jax.models.axial_vit.module import AxialViT as AxialViT
