"""Metrics that show whether features collapse, without labels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.models.dino_head import unit

_TINY = 1e-30  # features that are all 0 have the rank 0
_IMAGES = 256  # images whose features are used for the effective rank


def feature_metrics(features: Float[Array, 'n d']) -> dict[str, Array]:
  """Returns metrics of features, for the log and `recovery.limits`.

  - `feature_deviation`: standard deviation of the features after scaling them
    to length 1, √(sum of variances). It is 1 if the features point in all
    directions, and 0 if they are equal.
  - `effective_rank`: see `effective_rank`; of at most 256 images.

  Args:
    features: features, one row per image or crop.
  """
  features = jax.lax.stop_gradient(features)
  spread = jnp.var(unit(features, axis=-1), axis=0).sum()
  return {
    'feature_deviation': jnp.sqrt(spread),
    'effective_rank': effective_rank(features),
  }


def token_metrics(tokens: Float[Array, 'n p d']) -> dict[str, Array]:
  """Returns `feature_metrics` of the mean token of each image.

  Objectives that mask patches train their tokens, and the class token at most
  indirectly.

  Args:
    tokens: encoded tokens of patches.
  """
  return feature_metrics(tokens.mean(axis=1, dtype=jnp.float32))


def effective_rank(features: Float[Array, 'n d']) -> Float[Array, '']:
  """Computes (Σ σ²)² / Σ σ⁴ of the singular values σ, the participation ratio.

  It is between 1, if all features are multiples of each other, and the smaller
  of the dimensions, at most 256. To use different images, pass crops of the
  same image as adjacent rows: rows at equal distances are chosen.

  RankMe (arXiv 2210.02885) is the exponential of the entropy of σ / Σ σ. This
  is the exponential of the entropy of order 2 of σ² / Σ σ², which only needs
  products of matrices. A decomposition in every step would be slow, and `plan`
  could not count its iterations on TPUs.

  Args:
    features: features, one row per image or crop.
  """
  x = features[:: max(len(features) // _IMAGES, 1)][:_IMAGES]
  x = sharding.constrain(x.astype(jnp.float32), None, None)
  gram = jnp.matmul(x, x.T, precision='highest')
  return jnp.trace(gram) ** 2 / jnp.maximum(jnp.square(gram).sum(), _TINY)
