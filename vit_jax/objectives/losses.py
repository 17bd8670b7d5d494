"""Classification losses of each example, given labels or targets."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Labels = Int[Array, ' n'] | Float[Array, 'n k']


def _target_sum(
  logits: Float[Array, 'n k'], labels: Labels, on: float, off: float
) -> Float[Array, ' n']:
  """Computes Σ_c t_c z_c without an array of one-hot labels.

  Args:
    logits: z.
    labels: class indices, or targets between 0 and 1.
    on: t_c for the class of the label, or for a target of 1.
    off: t_c for other classes, or for a target of 0.
  """
  if labels.ndim == logits.ndim:
    targets = off + (on - off) * labels
    return jnp.sum(targets * logits, axis=-1)
  classes = jnp.arange(logits.shape[-1], dtype=labels.dtype)
  at_label = jnp.where(classes == labels[:, None], logits, 0).sum(axis=-1)
  spread = off * logits.sum(axis=-1) if off else 0.0
  return (on - off) * at_label + spread


def softmax_cross_entropy(
  logits: Float[Array, 'n k'],
  labels: Labels,
  smoothing: float = 0.0,
  class_weights: Float[Array, ' k'] | None = None,
) -> Float[Array, ' n']:
  """Computes the cross-entropy of a softmax over classes, in float32.

  Args:
    logits: unnormalized log probabilities.
    labels: class indices, or target probabilities, whose rows sum to 1.
    smoothing: α; the target becomes (1 − α) · target + α / k.
    class_weights: factor of each class's term in the sum over classes, after
      the smoothing, as in torch's `CrossEntropyLoss`; None for factors of 1.

  Returns:
    Loss of each example in nats, float32.

  Reference: Szegedy et al., arXiv 1512.00567, section 7 (smoothing).
  """
  logits = logits.astype(jnp.float32)
  off = smoothing / logits.shape[-1]
  if class_weights is not None:
    if labels.ndim < logits.ndim:
      labels = jax.nn.one_hot(labels, logits.shape[-1])
    targets = class_weights * ((1 - smoothing) * labels + off)
    return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)
  target_sum = _target_sum(logits, labels, 1 - smoothing + off, off)
  return jax.nn.logsumexp(logits, axis=-1) - target_sum


def sigmoid_cross_entropy(
  logits: Float[Array, 'n k'], labels: Labels, smoothing: float = 0.0
) -> Float[Array, ' n']:
  """Computes the sum over classes of the binary cross-entropies, in float32.

  The loss is Σ softplus(z) − t·z, which is numerically stable for any logit z.

  Args:
    logits: log odds of each class.
    labels: class indices, or targets in [0, 1], several of which may be 1.
    smoothing: α; targets of 1 and 0 become 1 − α and α (1e-4 on ImageNet-1k in
      the paper), not α / k as for the softmax.

  Returns:
    Loss of each example in nats, summed (not averaged) over classes, float32.
  """
  logits = logits.astype(jnp.float32)
  target_sum = _target_sum(logits, labels, 1 - smoothing, smoothing)
  return jax.nn.softplus(logits).sum(axis=-1) - target_sum


LOSSES = {'softmax': softmax_cross_entropy, 'sigmoid': sigmoid_cross_entropy}
# Probabilities of the classes, for which these are the losses. The outputs of a
# model trained with a squared error are numbers already.
PROBABILITIES = {'softmax': jax.nn.softmax, 'sigmoid': jax.nn.sigmoid}
PROBABILITIES |= {'squared': jnp.asarray}
