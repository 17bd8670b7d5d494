"""Classification losses, one value an example, from labels or targets."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Labels = Int[Array, ' n'] | Float[Array, 'n k']


def _target_sum(
  logits: Float[Array, 'n k'], labels: Labels, on: float, off: float
) -> Float[Array, ' n']:
  """Σ_c t_c z_c, with t = on at the label, off elsewhere; no one-hot array."""
  if labels.ndim == logits.ndim:
    targets = off + (on - off) * labels
    return jnp.sum(targets * logits, axis=-1)
  classes = jnp.arange(logits.shape[-1], dtype=labels.dtype)
  at_label = jnp.where(classes == labels[:, None], logits, 0).sum(axis=-1)
  spread = off * logits.sum(axis=-1) if off else 0.0
  return (on - off) * at_label + spread


def softmax_cross_entropy(
  logits: Float[Array, 'n k'], labels: Labels, smoothing: float = 0.0
) -> Float[Array, ' n']:
  """Cross-entropy of a soft-max over classes.

  Args:
    logits: unnormalised log probabilities; computed on in float32.
    labels: class indices, or target probabilities (rows that sum to 1).
    smoothing: α; the target becomes (1 − α) · target + α / k.

  Returns:
    The loss of each example, in nats, float32.

  Reference: Szegedy et al., arXiv 1512.00567, section 7 (smoothing).
  """
  logits = logits.astype(jnp.float32)
  off = smoothing / logits.shape[-1]
  target_sum = _target_sum(logits, labels, 1 - smoothing + off, off)
  return jax.nn.logsumexp(logits, axis=-1) - target_sum


def sigmoid_cross_entropy(
  logits: Float[Array, 'n k'], labels: Labels, smoothing: float = 0.0
) -> Float[Array, ' n']:
  """Sum over classes of the binary cross-entropies.

  Args:
    logits: log odds of each class; computed on in float32.
    labels: class indices, or targets in [0, 1] (several may be 1).
    smoothing: α; targets become 1 − α and α (the paper's authors: 1e-4 on
      ImageNet-1k), unlike the soft-max's α / k.

  Returns:
    The loss of each example, summed (not averaged) over classes, in nats,
    float32. Computed as Σ softplus(z) − t·z, which is stable for any logit.
  """
  logits = logits.astype(jnp.float32)
  target_sum = _target_sum(logits, labels, 1 - smoothing, smoothing)
  return jax.nn.softplus(logits).sum(axis=-1) - target_sum


LOSSES = {'softmax': softmax_cross_entropy, 'sigmoid': sigmoid_cross_entropy}
