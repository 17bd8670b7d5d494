"""LoRA: training of low-rank differences to the matrices of a frozen model.

Reference: arXiv 2106.09685.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from vit_jax.arrays import sharding, tree
from vit_jax.errors import UserError, check_choice, check_range
from vit_jax.models import layers
from vit_jax.objectives import contract
from vit_jax.objectives.contract import Frozen, Inputs, Loss

PyTree = Any
BIASES = ('none', 'targets', 'all')
_KERNEL, _BIAS = '/kernel', '/bias'
_STREAM = 0x6C6F7261  # folded into the key of the step


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
  """Low-rank differences W + (alpha / rank) A B to matrices of a model.

  A is initialized as in the authors' code and in `peft` (uniform in ±1 / √n for
  n inputs), and B with zeros, so training starts from the frozen model. The
  product is added to W, which a forward pass then uses like any other matrix.
  Only training with dropout, which applies to the inputs of A and not to those
  of W, computes both products with the inputs.

  Attributes:
    rank: number of columns of A and rows of B, less than the smaller side of
      each matrix; 0 to train the whole model.
    alpha: factor of the product A B, which is divided by the rank.
    targets: suffixes of the paths of matrices in the encoder's layers, whole
      parts of a path: 'query', 'key', 'value', 'out', 'fc1' and 'fc2' for all.
    bias: biases that are trained as well: 'none', those of the 'targets', or
      'all' of the model.
    dropout: dropout rate of the inputs of A in training, in [0, 1); each matrix
      has its own mask.
  """

  rank: int = 0
  alpha: float = 16.0
  targets: tuple[str, ...] = ('attention/query', 'attention/value')
  bias: str = 'none'
  dropout: float = 0.0

  def __post_init__(self):
    check_range('lora.rank', self.rank, at_least=0)
    check_range('lora.alpha', self.alpha, above=0)
    check_choice('lora.bias', self.bias, BIASES)
    check_range('lora.dropout', self.dropout, at_least=0, below=1)

  @property
  def scale(self) -> float:
    """Factor of the product A B."""
    return self.alpha / self.rank

  def init(
    self, key: Key[Array, ''], shapes: Mapping[str, tuple[int, ...]]
  ) -> dict[str, PyTree]:
    """Returns initial A, B and differences of biases, by the layer's path.

    Args:
      key: random key of the initialization.
      shapes: shapes of the frozen parameters by path.

    Raises:
      UserError: a target matches no layer, or the rank is too high for one.
    """
    sides = {
      path.removesuffix(_KERNEL): _sides(path, shape)
      for path, shape in shapes.items()
      if path.endswith(_KERNEL) and sharding.STACKED in path
    }
    used, unused = set(), []
    for target in self.targets:
      matching = {name for name in sides if f'/{name}'.endswith(f'/{target}')}
      used.update(matching)
      if not matching:
        unused.append(target)
    if unused or not used:
      raise UserError(
        f'lora.targets is {self.targets}, of which {unused} match no layer; '
        f'the layers are {", ".join(sides)}: give these paths, or whole parts '
        'of them at the end.'
      )
    result: dict[str, Any] = {}
    for layer in sorted(used):
      depth, inputs, outputs = sides[layer]
      if self.rank >= min(inputs, outputs):
        raise UserError(
          f'lora.rank is {self.rank}, but {layer} is a matrix of {inputs} x '
          f'{outputs}: set a rank below {min(inputs, outputs)}, or 0 to train '
          'the whole model.'
        )
      key, own = jax.random.split(key)
      limit = 1 / math.sqrt(inputs)
      result[f'{layer}/a'] = jax.random.uniform(
        own, (depth, inputs, self.rank), minval=-limit, maxval=limit
      )
      result[f'{layer}/b'] = jnp.zeros((depth, self.rank, outputs))
    biases = {
      'none': [],
      'targets': [layer + _BIAS for layer in sorted(used)],
      'all': [path for path in shapes if path.endswith(_BIAS)],
    }[self.bias]
    # Some layers have no bias.
    result |= {p: jnp.zeros(shapes[p]) for p in biases if p in shapes}
    return tree.unflatten(result)


def _sides(path: str, shape: tuple[int, ...]) -> tuple[int, int, int]:
  """Returns (layers, inputs, outputs) of a stacked kernel."""
  # The kernel of `out` is [layers, heads, width of a head, outputs]; others
  # have one axis of inputs.
  last = len(shape) - 1 if path.endswith('/out/kernel') else 2
  return shape[0], math.prod(shape[1:last]), math.prod(shape[last:])


class Adapted(contract.Objective):
  """An objective with LoRA: only the differences and the heads are trained.

  It is an `objectives.contract.Objective` whose parameters are those of `inner`
  without the frozen ones, and `lora/…` with the trained differences. The frozen
  ones are the frozen weights 'base'. Results and sets of weights have the
  parameters of `inner`, so evaluators and other formats need no LoRA.

  Attributes:
    inner: objective of the config.
    lora: section `lora` of the config.
    base: frozen parameters of the model; its attribute `without` lists those
      that are trained in full.
  """

  def __init__(self, inner: contract.Objective, lora: Lora, base: Frozen):
    """Checks that the objective can be trained with LoRA.

    Raises:
      UserError: the objective has a teacher that follows its parameters, or
        does not train the model.
    """
    self.inner, self.lora, self.base = inner, lora, base
    if type(inner).start_extra is not contract.Objective.start_extra:
      raise UserError(
        f'lora.rank is {lora.rank}, but the objective '
        f'{type(inner).__module__} has a teacher of its own, which LoRA does '
        'not support: set lora.rank=0, or another objective.name.'
      )
    if not inner.trains_model or inner.locked:
      raise UserError(
        f'lora.rank is {lora.rank}, but the objective {type(inner).__module__} '
        'does not train the model: set lora.rank=0, or, if the objective has '
        'these keys, objective.locked or objective.frozen to False.'
      )

  def __getattr__(self, name: str) -> Any:
    """Returns an attribute of `inner` that this class does not define."""
    return getattr(self.inner, name)

  @functools.cached_property
  def _prefix(self) -> str:
    """Start of the paths of the model's parameters among all parameters."""
    # The objective puts a model with a single parameter among its own.
    model: PyTree = {'parameter': 0}
    [path] = tree.flatten(self.inner.start_params({}, model))
    return path.removesuffix('parameter')

  def frozen(self) -> dict[str, Frozen]:
    """Returns the frozen weights of `inner`, and 'base'."""
    return self.inner.frozen() | {'base': self.base}

  def init(self, key: Key[Array, ''], batch: Any) -> tuple[PyTree, PyTree]:
    """Returns initial parameters, without frozen ones, and extra state."""
    params, extra = self.inner.init(key, batch)
    shapes = tree.shapes(self.base.shapes())
    kept = tree.flatten(params)
    for path in shapes:
      del kept[self._prefix + path]
    lora = self.lora.init(jax.random.fold_in(key, 1), shapes)
    return tree.unflatten(kept) | {'lora': lora}, extra

  def whole(
    self,
    params: PyTree,
    frozen: dict[str, PyTree],
    key: Key[Array, ''] | None = None,
  ) -> PyTree:
    """Returns the parameters of `inner`, with differences added.

    Args:
      params: trained parameters.
      frozen: frozen weights by name.
      key: random key of dropout, with which the layers have A and B for
        `layers.low_rank` instead of their product; None without dropout.
    """
    base, trained = tree.flatten(frozen['base']), tree.flatten(params['lora'])
    model = dict(base)
    for i, (path, leaf) in enumerate(trained.items()):
      layer, _, name = path.rpartition('/')
      if name == 'bias':
        model[path] = base[path] + leaf
      elif key is not None:
        model[path] = leaf
        own = jax.random.fold_in(key, i)
        model[f'{layer}/key'] = jax.random.split(own, len(leaf))
      elif name == 'b':
        kernel = base[layer + _KERNEL]
        product = trained[f'{layer}/a'] @ leaf  # [layers, inputs, outputs]
        product = self.lora.scale * product.reshape(kernel.shape)
        model[layer + _KERNEL] = kernel + product
    others = tree.flatten({k: v for k, v in params.items() if k != 'lora'})
    model = {self._prefix + path: leaf for path, leaf in model.items()}
    whole = tree.unflatten(others | model)
    return sharding.constrain_leaves(whole, self.inner.sharding_rules)

  def loss(self, params: PyTree, inputs: Inputs) -> Loss:
    """Computes the loss of `inner`."""
    return self._applied(self.inner.loss, params, inputs)

  def embed(self, params: PyTree, inputs: Inputs) -> PyTree:
    """Computes the values of `inner.embed`."""
    return self._applied(self.inner.embed, params, inputs)

  def _applied(
    self, function: Callable[..., Any], params: PyTree, inputs: Inputs
  ) -> Any:
    """Applies a function of `inner`, with dropout if it is set."""
    rate = self.lora.dropout
    key = jax.random.fold_in(inputs.key, _STREAM) if rate else None
    with layers.low_rank(rate, self.lora.scale):
      return function(self.whole(params, inputs.frozen, key), inputs)

  def layers_above(self, path: str) -> int | tuple[int, ...]:
    """Returns the number of layers above a parameter, see `contract`."""
    if path.startswith('lora/'):
      path = self._prefix + path.removeprefix('lora/')
    return self.inner.layers_above(path)


# `__getattr__` is not called for attributes that the base class defines, so
# `Adapted` gets a property for each of them that it does not define itself.
for _name in vars(contract.Objective):
  if _name not in vars(Adapted) and not _name.startswith('_'):
    setattr(Adapted, _name, property(operator.attrgetter(f'inner.{_name}')))


def adapted(
  inner: contract.Objective, lora: Lora, base: Frozen
) -> contract.Objective:
  """Returns the objective with LoRA; unchanged if the rank is 0.

  Args:
    inner: objective of the config.
    lora: section `lora` of the config.
    base: frozen parameters of the model, see `Adapted`.
  """
  if not lora.rank:
    return inner
  # The loop above has defined all methods of the base class.
  return Adapted(inner, lora, base)  # pyright: ignore[reportAbstractUsage]
