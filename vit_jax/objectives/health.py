"""Metrics that show whether features collapse, without labels."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from vit_jax.arrays import sharding
from vit_jax.models.dino_head import unit

# Images whose features are used for the effective rank, because the time of the
# decomposition grows with the third power.
_IMAGES = 256


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


def effective_rank(features: Float[Array, 'n d']) -> Float[Array, '']:
  """Computes the exponential of the entropy of normalized singular values.

  It is between 1, if all features are multiples of each other, and the smaller
  of the dimensions, at most 256. To use different images, pass crops of the
  same image as adjacent rows: rows at equal distances are chosen.

  Args:
    features: features, one row per image or crop.

  Reference: RankMe (arXiv 2210.02885), equation 1.
  """
  x = features[:: max(len(features) // _IMAGES, 1)][:_IMAGES]
  x = sharding.constrain(x.astype(jnp.float32), None, None)
  values = jnp.linalg.svd(x, compute_uv=False)
  return jnp.exp(jax.scipy.special.entr(values / values.sum()).sum())
