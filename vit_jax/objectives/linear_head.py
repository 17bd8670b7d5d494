"""Batch normalization of features, and a linear layer on them."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from vit_jax.objectives import contract

PyTree = Any
_RUNNING = 0.1  # weight of a batch in the running statistics
_INITIAL_STD = 0.01  # standard deviation of the initial kernel


class LinearHead(contract.AroundModel):
  """Base class of objectives with a linear layer on normalized features.

  Parameters: `model/…` and `head/{kernel,bias}`. Extra state: the running
  `mean` and `variance` of each feature, or nothing; weights for evaluation
  contain them as `statistics/…`. A subclass defines `features`, `loss` and
  `predict`.

  Attributes:
    classes: number of outputs of the linear layer.
    batch_norm: whether there are running statistics.
    epsilon: number that is added to the variance of a feature.
    needs: results of the model that `features` uses.
  """

  classes: int
  batch_norm: bool = True
  epsilon: float
  needs: tuple[str, ...]

  def features(
    self, params: PyTree, found: dict[str, Array]
  ) -> Float[Array, '*n d']:
    """Computes the features, before batch norm, from results of the model.

    Args:
      params: parameters of the model.
      found: results of the model, see `needs`.
    """
    raise NotImplementedError

  def inputs(
    self, params: PyTree, images: Any, key: Key[Array, ''] | None = None
  ) -> Float[Array, '*n d']:
    """Computes the features of normalized images, before batch norm.

    Args:
      params: parameters of the model.
      images: images, `[n, y, x, channels]`.
      key: random key of dropout and drop path; None for neither.
    """
    found = self.setting.predict(params, images, key, self.needs)
    return self.features(params, found)

  def init(self, key: Key[Array, ''], batch: Any) -> tuple[PyTree, PyTree]:
    """Returns initial parameters; running statistics with `batch_norm`."""
    model_key, head_key = jax.random.split(key)
    model = self.setting.init_model(model_key)
    images = self.setting.zero_images()
    width = jax.eval_shape(self.inputs, model, images).shape[-1]
    kernel = _INITIAL_STD * jax.random.normal(head_key, (width, self.classes))
    head = {'kernel': kernel, 'bias': jnp.zeros(self.classes)}
    extra = {'mean': jnp.zeros(width), 'variance': jnp.ones(width)}
    return {'model': model, 'head': head}, extra if self.batch_norm else {}

  def standardized(
    self, x: Float[Array, '*n d'], statistics: PyTree = None
  ) -> tuple[Float[Array, '*n d'], PyTree]:
    """Applies batch normalization without scale and shift.

    Args:
      x: features.
      statistics: running statistics; by default, those of the batch are used.

    Returns:
      Normalized features, and the statistics of the batch for `update_extra`;
      {} if running statistics are given.
    """
    if statistics is not None:
      mean, variance, carry = statistics['mean'], statistics['variance'], {}
    else:
      axes = tuple(range(x.ndim - 1))  # all but the last one
      count = x[..., 0].size  # number of feature vectors
      mean, variance = x.mean(axes), x.var(axes)
      # The running variance is unbiased, as in PyTorch.
      unbiased = variance * (count / max(count - 1, 1))
      carry = {'mean': mean, 'variance': unbiased}
    return (x - mean) / jnp.sqrt(variance + self.epsilon), carry

  def update_extra(
    self, params: PyTree, extra: PyTree, carry: PyTree, step: Int[Array, '']
  ) -> PyTree:
    """Returns the running statistics after a step."""
    return jax.tree.map(
      lambda old, new: old + _RUNNING * (new - old), extra, carry
    )

  def weights(self, params: PyTree, extra: PyTree) -> dict[str, PyTree]:
    """Returns the parameters together with the running statistics."""
    return {'params': params | ({'statistics': extra} if extra else {})}


def linear(head: PyTree, x: Float[Array, '*n d']) -> Float[Array, '*n k']:
  """Applies the linear layer in float32 precision on all devices."""
  return jnp.matmul(x, head['kernel'], precision='highest') + head['bias']
