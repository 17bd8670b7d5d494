"""python -m vit_jax.plan --config=FILE.py --topology=v3:4x4; see `main`."""

import sys

from vit_jax.plan import environment

if __name__ == '__main__':
  environment.prepare(sys.argv)  # before JAX is imported
  from vit_jax.cli import process
  from vit_jax.plan import main

  process.run(main.main, main.define_flags)
