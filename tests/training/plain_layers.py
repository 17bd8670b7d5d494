"""Layers in jax.numpy, written from the papers and the official codes.

They use nothing of vit_jax except its names and shapes of parameters.
"""

import jax
import jax.numpy as jnp


def dense(x, p, axes=1):
  return jnp.tensordot(x, p['kernel'], axes) + p['bias']


def norm(x, p):
  centered = x - x.mean(-1, keepdims=True)
  std = jnp.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
  return centered / std * p['scale'] + p['bias']


def attention(x, p):
  """Computes multi-head attention of tokens `[n, t, d]`."""
  q, k, v = (dense(x, p[name]) for name in ('query', 'key', 'value'))
  logits = jnp.einsum('nqhc,nkhc->nhqk', q, k) / jnp.sqrt(q.shape[-1])
  y = jnp.einsum('nhqk,nkhc->nqhc', jax.nn.softmax(logits, -1), v)
  return dense(y, p['out'], axes=2)


def mlp(x, p):
  return dense(jax.nn.gelu(dense(x, p['fc1'])), p['fc2'])


def block(x, p):
  """Computes equations 2 and 3 of the ViT paper."""
  x = x + attention(norm(x, p['norm1']), p['attention'])
  return x + mlp(norm(x, p['norm2']), p['mlp'])


def layer(stack, i):
  """Returns the parameters of layer `i` of a stack."""
  return jax.tree.map(lambda leaf: leaf[i], stack)


def patches(x, side):
  """Cuts `[n, y, x, c]` into `[n, rows, columns, side, side, c]`."""
  n, height, width, channels = x.shape
  x = x.reshape(n, height // side, side, width // side, side, channels)
  return x.transpose(0, 1, 3, 2, 4, 5)


def conv(x, p, before=False, stride=1):
  """Computes the convolution of BiT (activation before) or the hybrids."""
  kernel = p['kernel'] - p['kernel'].mean((0, 1, 2))
  variance = (kernel**2).mean((0, 1, 2))
  if before:
    kernel /= jnp.sqrt(variance + 1e-10)
  else:
    kernel /= jnp.sqrt(variance) + 1e-5
  side = len(kernel) // 2
  return jax.lax.conv_general_dilated(
    x,
    kernel,
    (stride, stride),
    [(side, side)] * 2 if before else 'SAME',
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )


def group_norm(x, p, epsilon):
  """Normalizes maps `[n, y, x, c]` over 32 groups of channels."""
  groups = x.reshape(*x.shape[:3], 32, -1)
  groups -= groups.mean((1, 2, 4), keepdims=True)
  variance = (groups**2).mean((1, 2, 4), keepdims=True)
  groups /= jnp.sqrt(variance + epsilon)
  return groups.reshape(x.shape) * p['scale'] + p['bias']


def window_maximum(x, padding='SAME'):
  """Computes the maximum over windows of 3x3 positions with stride 2."""
  window = (1, 3, 3, 1), (1, 2, 2, 1), padding
  return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *window)


def sigmoid_cross_entropy(logits, label):
  """Computes the sum over classes and the mean over examples."""
  targets = jax.nn.one_hot(label, logits.shape[-1])
  terms = jax.nn.softplus(logits) - targets * logits
  return terms.sum(-1).mean()
