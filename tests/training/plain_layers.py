"""Layers in jax.numpy as papers and official codes have them, and no more.

Nothing of vit_jax is used, but that parameters have its names and shapes.
"""

import jax
import jax.numpy as jnp


def dense(x, p, axes=1):
  return jnp.tensordot(x, p['kernel'], axes) + p['bias']


def norm(x, p):
  centred = x - x.mean(-1, keepdims=True)
  deviation = jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
  return centred / deviation * p['scale'] + p['bias']


def attention(x, p):
  """Multi-head attention of the tokens `[n, t, d]` to each other."""
  q, k, v = (dense(x, p[name]) for name in ('query', 'key', 'value'))
  logits = jnp.einsum('nqhc,nkhc->nhqk', q, k) / jnp.sqrt(q.shape[-1])
  y = jnp.einsum('nhqk,nkhc->nqhc', jax.nn.softmax(logits, -1), v)
  return dense(y, p['out'], axes=2)


def mlp(x, p):
  return dense(jax.nn.gelu(dense(x, p['fc1'])), p['fc2'])


def block(x, p):
  """Equations 2 and 3 of the ViT paper."""
  x = x + attention(norm(x, p['norm1']), p['attention'])
  return x + mlp(norm(x, p['norm2']), p['mlp'])


def layer(stack, i):
  """The parameters of one of several that are stacked."""
  return jax.tree.map(lambda leaf: leaf[i], stack)


def patches(x, side):
  """`[n, y, x, c]` → `[n, rows, columns, side, side, c]`."""
  n, height, width, channels = x.shape
  x = x.reshape(n, height // side, side, width // side, side, channels)
  return x.transpose(0, 1, 3, 2, 4, 5)


def conv(x, p, before=False, stride=1):
  """A standardised convolution: BiT's (activation before) or the hybrids'."""
  kernel = p['kernel'] - p['kernel'].mean((0, 1, 2))
  variance = (kernel**2).mean((0, 1, 2))
  if before:
    kernel /= jnp.sqrt(variance + 1e-10)
  else:
    kernel /= jnp.sqrt(variance) + 1e-5
  side = len(kernel) // 2
  return jax.lax.conv_general_dilated(
    *(x, kernel, (stride, stride), [(side, side)] * 2 if before else 'SAME'),
    dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )


def group_norm(x, p, epsilon):
  """Of maps `[n, y, x, c]`; 32 groups of channels."""
  groups = x.reshape(*x.shape[:3], 32, -1)
  groups -= groups.mean((1, 2, 4), keepdims=True)
  variance = (groups**2).mean((1, 2, 4), keepdims=True)
  groups /= jnp.sqrt(variance + epsilon)
  return groups.reshape(x.shape) * p['scale'] + p['bias']


def window_maximum(x, around='SAME'):
  """Of 3x3 places at stride 2."""
  window = (1, 3, 3, 1), (1, 2, 2, 1), around
  return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, *window)


def sigmoid_cross_entropy(logits, label):
  """Summed over classes, the mean over examples."""
  targets = jax.nn.one_hot(label, logits.shape[-1])
  terms = jax.nn.softplus(logits) - targets * logits
  return terms.sum(-1).mean()
