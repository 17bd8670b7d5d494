"""Tests of FLOPs counted in traced programs against published values."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from tests.faults.counts import further
from vit_jax.arrays import flops
from vit_jax.models import resnet
from vit_jax.models.contract import abstract_params
from vit_jax.models.vit import Model

SMALL = dict(patch_size=4, width=16, depth=3, mlp_dim=40, num_heads=2)


def forward(function, *arguments):
  """Returns the FLOPs of a function without parameters."""
  return flops.of_training(lambda _, *inputs: function(*inputs), (), *arguments)


def shape(*sides):
  return jax.ShapeDtypeStruct(sides, jnp.float32)


def vit_forward(model, size):
  """Computes the matrix FLOPs of one image's forward pass by formula."""
  rows, columns = size[0] // model.patch_size, size[1] // model.patch_size
  tokens = rows * columns + (model.pool == 'token')
  width, mlp_dim = model.width, model.mlp_dim
  layer = 4 * tokens * width**2 + 2 * tokens**2 * width
  layer += 2 * tokens * width * mlp_dim
  top = width * model.num_classes + width**2 * model.pre_logits
  if model.pool == 'map':  # keys and values of all tokens; one query
    top += 2 * tokens * width**2 + 2 * width**2
    top += 2 * tokens * width + 2 * width * mlp_dim
  patches = rows * columns * 3 * model.patch_size**2 * width
  return 2 * (model.depth * layer + patches + top)


def counted(model, size):
  """Counts (forward, training) FLOPs of one image in the traced program."""
  params, images = abstract_params(model, size), shape(1, *size, 3)

  def logits(params, images):
    return model.apply({'params': params}, images)

  return (
    forward(logits, params, images),
    flops.of_training(lambda *args: logits(*args).sum(), params, images),
  )


@pytest.mark.parametrize(
  'classes, size, settings',
  [
    (10, (16, 24), dict(pre_logits=True)),
    (0, (18, 17), dict(remainder='drop', pool='gap')),
    (10, (16, 16), dict(unroll=3, remat='dots')),
    (10, (16, 16), dict(remat='full', dtype='float32')),
    (10, (16, 16), dict(pool='map')),
  ],
)
def test_flops_of_a_vit_equal_the_formula(classes, size, settings):
  """Training takes three times the FLOPs of the forward pass.

  In bfloat16, the attention logits are computed twice to save memory.
  """
  model = Model(classes, **SMALL, **settings)
  expected = vit_forward(model, size)
  assert counted(model, size) == (expected, 3 * expected)


MATRIX, X = shape(4, 4), shape(8, 4)
ONCE = 2 * 8 * 4 * 4  # FLOPs of the product of `X` and `MATRIX`


def test_frozen_weights_have_no_gradient():
  """They pass gradients on: forward product and one of the backward pass."""

  def loss(params, x, frozen):
    images = x @ frozen  # without a gradient
    hidden = images @ (params + 2 * frozen)
    return jax.lax.scan(lambda x, w: (x @ w, None), hidden, frozen[None])[0]

  count = flops.of_training(loss, MATRIX, X, frozen=MATRIX)
  assert count == (1 + 3 + 2) * ONCE


def test_frozen_inputs_have_no_backward_flops():
  """This includes stop_gradient; a trained parameter adds two products."""

  def loss(params, teacher, x):
    student = x @ params
    stopped = jax.lax.stop_gradient(student) @ params
    return (x @ teacher).sum() + (stopped - student).sum()

  def constant(params, teacher, x):
    return (jax.lax.stop_gradient(x @ params) @ teacher).sum()

  assert flops.of_training(loss, MATRIX, MATRIX, X) == (1 + 3 + 3) * ONCE
  assert flops.of_training(constant, MATRIX, MATRIX, X) == (3 + 1) * ONCE


def test_flops_of_scan_and_cond():
  """Each iteration counts; dependence on parameters passes the carry."""

  def loss(params, x):
    def body(carry, _):
      y, z = carry
      return (z @ jnp.eye(4), y @ params), None

    return jax.lax.scan(body, (x, x), None, length=5)[0][0].sum()

  assert forward(loss, MATRIX, X) == 5 * 2 * ONCE
  assert flops.of_training(loss, MATRIX, X) == 3 * 5 * 2 * ONCE

  def branch(flag, x):
    return jax.lax.cond(flag, lambda x: x @ x.T @ x, lambda x: x, x)

  flag = jax.ShapeDtypeStruct((), bool)
  assert forward(branch, flag, X) == 2 * 2 * 8 * 8 * 4


def test_flops_of_a_convolution_leave_out_padding():
  """Groups divide the FLOPs; products with padding are not counted.

  Of the 3 taps at 4 positions, one is in the padding behind 8 pixels.
  """
  x, kernel = shape(2, 8, 8, 6), shape(3, 3, 2, 12)

  def convolve(x, kernel):
    return jax.lax.conv_general_dilated(
      x,
      kernel,
      (2, 2),
      'SAME',
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
      feature_group_count=3,
    )

  expected = 2 * (2 * 12) * (4 * 3 - 1) ** 2 * 2
  assert forward(convolve, x, kernel) == expected


def test_a_pallas_kernel_counts_its_cost_estimate():

  def kernel(x):
    return pl.pallas_call(
      lambda x_ref, y_ref: y_ref.__setitem__(..., x_ref[...]),
      out_shape=shape(8, 4),
      cost_estimate=pl.CostEstimate(
        flops=1234, transcendentals=0, bytes_accessed=0
      ),
      interpret=True,
    )(x)

  assert forward(kernel, shape(8, 4)) == 1234


@pytest.mark.slow
@pytest.mark.parametrize(
  'variant, epochs, exaflops',
  [
    ('L/16', 7, 783),
    ('R50+B/16', 7, 274),
    *further(
      ['L/32', 7, 196],
      ['H/14', 14, 4262],
      ['R50+L/16', 14, 1668],  # the table has 859 for 7 epochs, not 834
      ['R152x2', 7, 563],
      ['R200x3', 14, 3306],
    ),
  ],
)
def test_pretraining_compute_agrees_with_table_6(variant, epochs, exaflops):
  """The total compute of pre-training on JFT (303 million images per epoch)."""
  build = Model if '/' in variant else resnet.Model
  training = counted(build(18291, variant=variant), (224, 224))[1]
  assert training * 303e6 * epochs / 1e18 == pytest.approx(exaflops, rel=0.03)
