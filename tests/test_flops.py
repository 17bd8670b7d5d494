"""The arithmetic of a forward pass, counted again from the traced program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import flops
from vit_jax.models.vit import Model

SMALL = dict(patch_size=4, width=16, depth=3, mlp_dim=40, num_heads=2)


def traced_flops(jaxpr):
  """FLOPs of the matrix products in a jaxpr: 2 x outputs x contracted."""
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      (contracted, _), _ = equation.params['dimension_numbers']
      shape = equation.invars[0].aval.shape
      depth = np.prod([shape[dim] for dim in contracted])
      total += 2 * int(np.prod(equation.outvars[0].aval.shape) * depth)
    times = equation.params.get('length', 1)  # of a scan
    for inner in jax.tree.leaves(list(equation.params.values())):
      inner = getattr(inner, 'jaxpr', inner)  # of a closed one
      if hasattr(inner, 'eqns'):
        total += times * traced_flops(inner)
  return total


# In bfloat16 the logits of attention are made twice, see models/attention.py.
ONCE = dict(dtype='float32')


def forward_jaxpr(model, size):
  """The traced forward pass of one image."""
  images = jax.ShapeDtypeStruct((1, *size, 3), jnp.float32)
  variables = jax.eval_shape(model.init, jax.random.key(0), images)
  return jax.make_jaxpr(model.apply)(variables, images).jaxpr


@pytest.mark.parametrize(
  'classes, size, settings',
  [
    (10, (16, 16), dict()),
    (10, (16, 24), dict(pool='gap')),
    (10, (16, 16), dict(pre_logits=True)),
    (0, (16, 16), dict()),
    (10, (18, 17), dict(remainder='drop')),
    (10, (16, 16), dict(unroll=3)),
    (10, (16, 16), dict(pool='map')),
  ],
)
def test_formula_counts_every_matrix_product(classes, size, settings):
  """The closed form is what the traced program multiplies."""
  model = Model(classes, **SMALL, **settings, **ONCE)
  traced = traced_flops(forward_jaxpr(model, size))
  assert model.forward_flops(size) == traced


def test_vit_b16_by_trace():
  """It holds at the paper's sizes too."""
  model = Model(1000, variant='B/16', **ONCE)
  assert model.forward_flops((224, 224)) == traced_flops(
    forward_jaxpr(model, (224, 224))
  )


@pytest.mark.parametrize(
  'variant, train_gflops',
  [('S/16', 27.7), ('B/16', 105.5), ('L/16', 369.6), ('H/14', 1004)],
)
def test_published_figures(variant, train_gflops):
  """A training step costs three forward passes; per image at 224 px."""
  # Published with three or four digits, and not said for which head and
  # pooling; together they make up to 0.5 %.
  image_flops = 3 * Model(1000, variant=variant).forward_flops((224, 224))
  assert image_flops / 1e9 == pytest.approx(train_gflops, rel=5e-3)


@pytest.mark.parametrize(
  'kind, teraflops',
  [
    ('TPU v3', 61.5),
    ('TPU v4', 275),
    ('TPU v5 lite', 197),
    ('TPU v5p', 459),
    ('TPU v6 lite', 918),
    ('NVIDIA A100-SXM4-80GB', 312),
    ('NVIDIA H100 80GB HBM3', 989),
    ('NVIDIA H100 PCIe', 756),
    ('NVIDIA H100 PCIe MIG 7g.80gb', 756),
    ('NVIDIA H200', 989),
  ],
)
def test_peaks(kind, teraflops):
  """Vendors' figures by the name JAX gives; GPUs' names go on after it."""
  assert flops.peak_flops(kind) == teraflops * 1e12


@pytest.mark.parametrize('kind', ['cpu', 'TPU v3x', 'TPU v99', 'NVIDIA T4', ''])
def test_unknown_devices_have_no_peak(kind):
  """No figure is better than a wrong one."""
  assert flops.peak_flops(kind) is None
