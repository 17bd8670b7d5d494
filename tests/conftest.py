"""Eight virtual CPU devices and run-time type checks for the whole suite."""

import os

# Before jax is imported: it reads both only once.
os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = ' '.join(
  [
    os.environ.get('XLA_FLAGS', ''),
    '--xla_force_host_platform_device_count=8',
  ]
).strip()

import jaxtyping  # noqa: E402 (after the environment)

# Every annotated function of the package checks its arguments and result, the
# shapes of arrays included, while the tests run; flax modules are no exception.
jaxtyping.install_import_hook('vit_jax', 'typecheck.typechecked')
