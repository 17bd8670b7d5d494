"""Compiles the attention kernels for every TPU: python compile_kernels.py."""

import os
import sys

from vit_jax.plan import environment

TOPOLOGIES = {
  **{'v2': '2x2', 'v3': '2x2', 'v4': '2x2x1', 'v5e': '2x2', 'v5p': '2x2x1'},
  **{'v6e': '2x2', 'tpu7x': '2x2x1'},
}
# tokens, width, heads, dtype: B/32 at 224 px, MAE's decoder, H/14 and g/14 at
# 224 px, L/16 at 512 px, and the largest number of tokens of each kind of head.
SHAPES = (
  (50, 768, 12, 'bfloat16'),
  (197, 512, 16, 'bfloat16'),
  (257, 1280, 16, 'bfloat16'),
  (257, 1408, 16, 'bfloat16'),
  (1025, 1024, 16, 'bfloat16'),
  (657, 384, 4, 'bfloat16'),
  *((1100, 256, heads, 'bfloat16') for heads in (2, 4, 8)),
  *((700, 256, heads, 'float32') for heads in (2, 4, 8)),
  *((478, 1280, 16, 'bfloat16'), (239, 1280, 16, 'float32')),
  *((263, 1408, 16, 'bfloat16'), (131, 1408, 16, 'float32')),
)


def main():
  """Prints one line for each TPU version and shape."""
  environment.prepare(sys.argv)
  import jax
  import jax.numpy as jnp

  from vit_jax.arrays import sharding
  from vit_jax.models.attention import tpu
  from vit_jax.plan import topology

  def loss(projections, biases, heads):
    y = tpu.attend(projections, biases, heads)
    return y.astype(jnp.float32).sum()

  for version, shape in TOPOLOGIES.items():
    devices = topology.find(f'{version}:{shape}').devices
    mesh = sharding.make_mesh(devices)
    for tokens, width, heads, dtype in SHAPES:
      x = jax.ShapeDtypeStruct(
        (8 * len(devices), tokens, width),
        dtype,
        sharding=sharding.batch_sharding(mesh),
      )
      bias = jax.ShapeDtypeStruct(
        (width,), dtype, sharding=sharding.replicated(mesh)
      )
      with jax.set_mesh(mesh):
        assert tpu.applies(tokens, width, heads, dtype)
        both = jax.value_and_grad(loss, argnums=(0, 1))
        step = jax.jit(both, static_argnums=2)
        lowered = step.lower((x,) * 3, (bias,) * 3, heads)
        text = lowered.compile().as_text()
      kernels = text.count('custom_call_target="tpu_custom_call"')
      print(version, tokens, width, heads, kernels, flush=True)


if __name__ == '__main__':
  sys.path.insert(0, os.getcwd())
  main()
