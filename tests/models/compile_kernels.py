"""Compiles the attention kernels for every TPU.

Usage: python tests/models/compile_kernels.py [VERSION ...]

Prints one line for each version, sequence and layout. The largest sequences
are compiled for the given versions only, because they take longer.
"""

import os
import sys

from vit_jax.plan import environment

TOPOLOGIES = {
  'v2': '2x2',
  'v3': '2x2',
  'v4': '2x2x1',
  'v5e': '2x2',
  'v5p': '2x2x1',
  'v6e': '2x2',
  'tpu7x': '2x2x1',
}
# tokens, width, heads, dtype: B/32 at 224 px, MAE's decoder, H/14 and g/14 at
# 224 px, L/16 at 512 px, Ti/16.
SHAPES = (
  (50, 768, 12, 'bfloat16'),
  (197, 512, 16, 'bfloat16'),
  (257, 1280, 16, 'bfloat16'),
  (257, 1408, 16, 'bfloat16'),
  (1025, 1024, 16, 'bfloat16'),
  (197, 192, 3, 'bfloat16'),
)
# Heads of 96 channels, and the largest sequences of each layout.
LARGEST = (
  (657, 384, 4, 'bfloat16'),
  (1100, 256, 2, 'bfloat16'),
  (1100, 256, 8, 'bfloat16'),
  (700, 256, 2, 'float32'),
  (700, 256, 8, 'float32'),
  (478, 1280, 16, 'bfloat16'),
  (131, 1408, 16, 'float32'),
  (1400, 256, 4, 'bfloat16'),
  (2400, 256, 4, 'bfloat16'),
  (1200, 256, 4, 'float32'),
  (1404, 1280, 16, 'bfloat16'),
  (386, 1408, 16, 'float32'),
)
# Swin: windows, tokens of a window, channels, heads
WINDOWS = (
  (64, 49, 96, 3),
  (64, 49, 128, 4),
  (1, 49, 1024, 32),
  (16, 144, 256, 8),
)


def main():
  versions = sys.argv[1:]
  environment.prepare(sys.argv)
  import jax
  import jax.numpy as jnp

  from vit_jax.arrays import sharding
  from vit_jax.models.attention import tpu
  from vit_jax.plan import topology

  def loss(projections, biases, heads, *offsets):
    y = tpu.attend(projections, biases, heads, *offsets)
    return y.astype(jnp.float32).sum()

  def compile_both(mesh, tokens, width, heads, dtype, windows=None):
    """Compiles both kernels; prints how many kernels the program has."""
    everywhere = sharding.replicated(mesh)

    def array(*shape, dtype=dtype, sharding=everywhere):
      return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    axes, offsets = (8 * mesh.size, tokens, width), ()
    if windows:
      axes = (axes[0], windows, *axes[1:])
      offsets = (array(heads, tokens, tokens), array(windows, tokens, tokens))
    x = array(*axes, sharding=sharding.batch_sharding(mesh))
    with jax.set_mesh(mesh):
      assert tpu.fits(tokens, width // heads, dtype, one_tile=bool(windows))
      both = jax.value_and_grad(loss, argnums=(0, 1))
      step = jax.jit(both, static_argnums=2)
      lowered = step.lower((x,) * 3, (array(width),) * 3, heads, *offsets)
      text = lowered.compile().as_text()
    kernels = text.count('custom_call_target="tpu_custom_call"')
    print(version, tokens, width, heads, kernels, flush=True)

  for version, shape in TOPOLOGIES.items():
    mesh = sharding.make_mesh(topology.find(f'{version}:{shape}').devices)
    for sizes in SHAPES + (LARGEST if version in versions else ()):
      compile_both(mesh, *sizes)
    for windows, *sizes in WINDOWS:
      compile_both(mesh, *sizes, 'bfloat16', windows)


if __name__ == '__main__':
  sys.path.insert(0, os.getcwd())
  main()
