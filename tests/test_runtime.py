"""What a process sets up before it runs."""

import jax
import pytest

from vit_jax import runtime


@pytest.fixture
def cache_dir():
  """Restores JAX's setting."""
  before = jax.config.jax_compilation_cache_dir
  yield
  jax.config.update('jax_compilation_cache_dir', before)


@pytest.mark.parametrize(
  'backend, given, expected',
  [
    ('cpu', None, None),
    ('tpu', None, '/.cache/vit_jax/compiled'),
    ('gpu', None, '/.cache/vit_jax/compiled'),
    ('tpu', '/given', '/given'),
  ],
)
def test_compilation_cache(monkeypatch, cache_dir, backend, given, expected):
  """On by default on accelerators, where the user says if the user says."""
  monkeypatch.setattr(jax, 'default_backend', lambda: backend)
  jax.config.update('jax_compilation_cache_dir', given)
  runtime.cache_compilations()
  came = jax.config.jax_compilation_cache_dir
  assert (came or '').endswith(expected or '') and bool(came) == bool(expected)
