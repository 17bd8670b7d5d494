"""A ViT and its training step as in a Flax tutorial."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.models import vit
from vit_jax.objectives import losses


class Layer(nn.Module):
  """Pre-norm attention and MLP, in the form of a scan body."""

  size: dict[str, int]
  dtype: Any

  @nn.compact
  def __call__(self, x, _):
    size, dtype = self.size, self.dtype
    dense = functools.partial(nn.Dense, dtype=dtype)
    norm = functools.partial(nn.LayerNorm, dtype=dtype, epsilon=1e-6)
    x += nn.MultiHeadDotProductAttention(size['num_heads'], dtype=dtype)(
      norm()(x)
    )
    y = nn.gelu(dense(size['mlp_dim'])(norm()(x)))
    return x + dense(size['width'])(y), None


class Plain(nn.Module):
  """A ViT: patches, class token, positions, layers and head.

  The layers are a Python loop, or one scan under full rematerialization.
  """

  variant: str
  classes: int
  dtype: Any
  scanned: bool = False

  @nn.compact
  def __call__(self, x):
    size, dtype = vit.VARIANTS[self.variant], self.dtype
    p, width = size['patch_size'], size['width']
    x = nn.Conv(width, (p, p), (p, p), padding='VALID', dtype=dtype)(x)
    x = x.reshape(x.shape[0], -1, width)
    zeros, normal = nn.initializers.zeros_init(), nn.initializers.normal(0.02)
    cls = self.param('cls', zeros, (1, 1, width)).astype(dtype)
    x = jnp.concatenate([jnp.tile(cls, (len(x), 1, 1)), x], axis=1)
    x += self.param('positions', normal, (1, *x.shape[1:])).astype(dtype)
    if self.scanned:
      layers = nn.scan(
        nn.remat(Layer, prevent_cse=False),
        variable_axes={'params': 0},
        split_rngs={'params': True},
        length=size['depth'],
      )
      x, _ = layers(size, dtype)(x, None)
    else:
      for _ in range(size['depth']):
        x, _ = Layer(size, dtype)(x, None)
    x = nn.LayerNorm(dtype=dtype, epsilon=1e-6)(x)[:, 0]
    return nn.Dense(self.classes, dtype=dtype)(x).astype(jnp.float32)


def training(
  model: Plain,
) -> tuple[Callable[[Any], Any], Callable[..., tuple[Any, Any]]]:
  """Returns (images → state, (state, images, labels) → (state, loss))."""
  optimizer = optax.adamw(1e-3)

  def init(images):
    params = model.init(jax.random.key(0), images[:1])
    return params, optimizer.init(params)

  def step(state, images, labels):
    params, opt_state = state

    def loss_fn(params):
      logits = model.apply(params, images)
      return losses.sigmoid_cross_entropy(logits, labels).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss

  return init, step


def compiled(
  config: Any, target: Any, scanned: bool = False
) -> jax.stages.Compiled:
  """Compiles a training step for absent devices, on which it is data-parallel.

  Args:
    config: completed config, of which model, classes, image size and batch size
      are used.
    target: `plan.topology.Target`.
    scanned: whether the layers are scanned.
  """
  from vit_jax.plan import compile

  sizes = config.model.variant, config.num_classes
  model = Plain(*sizes, jnp.bfloat16, scanned=scanned)
  init, step = training(model)
  mesh = jax.sharding.Mesh(np.asarray(target.devices), ('data',))
  everywhere, split = (
    jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
    for axes in ((), ('data',))
  )
  shape = (config.batch_size, *config.image_size, 3)
  images = jax.ShapeDtypeStruct(shape, jnp.float32)
  labels = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
  on_devices = jax.jit(
    step, in_shardings=(everywhere, split, split), donate_argnums=0
  )
  lowered = on_devices.lower(jax.eval_shape(init, images), images, labels)
  options = compile.GPU_OPTIONS if target.on_gpus else None
  return lowered.compile(compiler_options=options)
