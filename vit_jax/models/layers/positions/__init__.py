"""Position embeddings of a Transformer, and their interpolation."""

from vit_jax.models.layers.positions.embeddings import KINDS as KINDS
from vit_jax.models.layers.positions.embeddings import Positions as Positions
from vit_jax.models.layers.positions.embeddings import Scheme as Scheme
from vit_jax.models.layers.positions.resizing import METHODS as METHODS
from vit_jax.models.layers.positions.resizing import (
  check_method as check_method,
)
from vit_jax.models.layers.positions.resizing import resize as resize
from vit_jax.models.layers.positions.resizing import resize_axis as resize_axis
from vit_jax.models.layers.positions.resizing import resize_leaf as resize_leaf
from vit_jax.models.layers.positions.resizing import (
  resize_leaves as resize_leaves,
)
from vit_jax.models.layers.positions.resizing import square_grid as square_grid
