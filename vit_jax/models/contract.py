"""What the framework asks of a model, whatever is inside it."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key

from vit_jax.errors import UserError

PyTree = Any
Size = tuple[int, int]  # (height, width) of images, pixels

# What `predict` returns beside features and logits where `want` names it.
WANTED = ('tokens', 'layers', 'attention', 'heads')


class Places(NamedTuple):
  """Where tokens are in their image.

  Attributes:
    grid: rows and columns of all patches of the image.
    kept: int `[n, kept]`, which patch each token is of, counted row by row as
      `embed` returns them; None for all patches in that order.
  """

  grid: tuple[int, int]
  kept: Int[Array, 'n kept'] | None = None


class Model(Protocol):
  """A model: state in, state out.

  `vit_jax.models.NAME` (or any module of your own) defines
  `Model(num_classes, /, *, …)`, which returns one of these; its keyword-only
  parameters are the keys of the config's `model` section. `num_classes=0` is a
  model without a head, whose logits are its features.

  A Flax Linen module has `init` and `apply` already. The methods that `apply`
  reaches by `method='predict'` (`'embed'`, …) see the parameters they are
  applied to:

  - `predict(images, key=None, want=())` → `features` `[n, width]` and `logits`
    `[n, num_classes]`, float32. A key turns on what is random in training.
    What `want` names comes besides: `tokens` `[n, t, d]` after the last norm,
    `layers` `[n, layers, t, d]` after every block, `attention`
    `[n, layers, heads, q, k]`, `heads` `[n, heads, num_classes]` the logits of
    each head (of a distilled model: of its labels and of its teacher, `logits`
    being their mean). A model raises UserError for what it has not.
  - `embed(images)` → tokens of patches, what is added before the first layer
    included; `encode(tokens, key, places=None)` → all tokens after the last
    norm; `readout(tokens)` → features and logits. Only models of tokens have
    these three; self-supervision is built on them. Tokens may be left out in
    between; `places` then says which are there, as
    `Places(model.grid(image_size), kept)`, because positions may act in every
    layer. A model whose positions do so raises UserError without it.
  - `grid(image_size)` → rows and columns of patches, and `patch_pixels`, the
    side of a patch in the image: of models of tokens, and asked of the model
    itself, not by `apply`. The last tokens are those of patches, in rows. Where
    a token is read out it is the first, and its parameter is `cls`.

  Images are float `[n, y, x, 3]` in [-1, 1].

  Attributes:
    num_classes: outputs of the head; 0 for none.
    fresh: starts of the paths of parameters that fine-tuning begins anew.
    sized: starts of the paths of parameters that depend on the image size.
    sharding_rules: (end of a parameter's path, its dimension that the mesh's
      axis `model` splits); a regular expression and a number.
    apart: ends of the paths of stacked parameters whose gradients are best
      summed over micro-batches layer by layer.
    architecture: keys of the config's `model` section that the parameters
      decide, with their values; a fine-tuning takes them over. A config says
      one of them itself where it is not None, and must then agree.
    reference: the same function of the same parameters by plain XLA operations
      alone. FLOPs are counted from it, and kernels compared with it.
    kernels: `Kernels`; None if it uses none of its own on the devices of the
      surrounding mesh.
  """

  @property
  def num_classes(self) -> int: ...

  @property
  def fresh(self) -> tuple[str, ...]: ...

  @property
  def sized(self) -> tuple[str, ...]: ...

  @property
  def sharding_rules(self) -> tuple[tuple[str, int], ...]: ...

  @property
  def apart(self) -> tuple[str, ...]: ...

  @property
  def architecture(self) -> dict[str, Any]: ...

  @property
  def reference(self) -> 'Model': ...

  @property
  def kernels(self) -> 'Kernels | None': ...

  def init(self, key: Key[Array, ''], images: Any) -> dict[str, PyTree]:
    """`{'params': fresh parameters}` for images of that shape."""
    ...

  def apply(
    self,
    variables: dict[str, PyTree],
    *args: Any,
    method: str | Callable[..., Any] | None = None,
    **kwargs: Any,
  ) -> Any:
    """Logits of `(images, key=None)`, or what another method returns."""
    ...

  def check(self, image_size: Size) -> None:
    """Raises UserError if images cannot have that size."""
    ...

  def adapt(
    self,
    leaves: dict[str, Float[np.ndarray, '...']],
    old_size: Size,
    new_size: Size,
    method: str,
  ) -> dict[str, Float[np.ndarray, '...']]:
    """What `sized` names, for images of another size.

    Args:
      leaves: {path: array} for images of `old_size`, on the host.
      old_size: pixels.
      new_size: pixels.
      method: of `config.position_resize`.
    """
    ...

  def at_sizes(self, made_for: Size, offset: float = 0.0) -> 'Model':
    """The same model for images of any size; parameters stay for `made_for`.

    What depends on the size is interpolated where it is used, in the program,
    with gradients; `adapt` makes other parameters, once. `offset` is that of
    `positions.resizing.cubic`. Raises UserError if it cannot be.
    """
    ...

  def computed_by(self, image_size: Size) -> str:
    """What computes it on the devices of the surrounding mesh, in a few words.

    For the log and for `plan`: which of several ways is taken.
    """
    ...

  def compiler_options(
    self, platform: str, num_devices: int
  ) -> dict[str, str | int]:
    """What XLA is asked for when a step of this model is compiled."""
    ...


class Stem(Protocol):
  """What images of a Vision Transformer may go through before its patches.

  `vit_jax.models.stems.NAME` (or any module of your own) defines
  `Stem(dtype, remat, unroll, /, *, …)`, which returns one of these, a Flax
  module; its keyword-only parameters are the keys of the section `model.stem`.
  The other three are the model's own settings.

  Attributes:
    stride: pixels for one place of the map.
    section: the config section that it is built from, its name and whatever
      decides about parameters.
    sharding_rules: as a model's.
    reference: as a model's.
  """

  @property
  def stride(self) -> int: ...

  @property
  def section(self) -> dict[str, Any]: ...

  @property
  def sharding_rules(self) -> tuple[tuple[str, int], ...]: ...

  @property
  def reference(self) -> 'Stem': ...

  def __call__(
    self, images: Float[Array, 'n y x 3']
  ) -> Float[Array, 'n rows columns c']:
    """Maps of ⌈y / stride⌉ rows and ⌈x / stride⌉ columns."""
    ...


class Kernels(NamedTuple):
  """What a model with kernels of its own says about them.

  Attributes:
    probe: a model that is compiled in seconds and gives its kernels the shapes
      and types that they have in this model (two layers of it, say). It is
      compared with its `reference` before a run.
    plain: this model without kernels, otherwise unchanged; used for the run if
      the comparison fails.
  """

  probe: Model
  plain: Model


class Defaults:
  """Answers for a model that has nothing to say; a base class, if you like."""

  fresh: tuple[str, ...] = ('head/',)
  sized: tuple[str, ...] = ()
  sharding_rules: tuple[tuple[str, int], ...] = ()
  apart: tuple[str, ...] = ()
  kernels: Kernels | None = None

  @property
  def architecture(self) -> dict[str, Any]:
    """The config says it all."""
    return {}

  @property
  def reference(self) -> Any:
    """Itself: it has no kernels."""
    return self

  def check(self, image_size: Size) -> None:
    """Images may have any size."""
    del image_size

  def adapt(
    self,
    leaves: dict[str, Any],
    old_size: Size,
    new_size: Size,
    method: str,
  ) -> dict[str, Any]:
    """Nothing depends on the size."""
    del old_size, new_size, method
    return leaves

  def at_sizes(self, made_for: Size, offset: float = 0.0) -> Any:
    """Itself, if no parameter depends on the size."""
    del offset
    if self.sized:
      raise UserError(
        f'{", ".join(self.sized)} of this model are for {made_for[0]}x'
        f'{made_for[1]} pixels alone, and images of several sizes are to go '
        "through it: take model.name='vit', and no relative positions."
      )
    return self

  def computed_by(self, image_size: Size) -> str:
    """There is one way only."""
    del image_size
    return 'XLA'

  def compiler_options(
    self, platform: str, num_devices: int
  ) -> dict[str, str | int]:
    """Nothing is asked for."""
    del platform, num_devices
    return {}


def refuse_others(
  want: tuple[str, ...], known: tuple[str, ...], who: str, method: str = ''
) -> None:
  """Raises UserError where `predict` is asked for what a model has not.

  Args:
    want: what it is asked for, of `WANTED`.
    known: what it has.
    who: the model, for people.
    method: of the model, which gives the maps of all its stages.
  """
  refused = [name for name in want if name not in known]
  if refused:
    stages = (
      f", and by the method {method!r} its stages' maps, whose shapes differ "
      'and do not stack'
    )
    raise UserError(
      f'{who} has no {" or ".join(refused)} to give; it has '
      f'{", ".join(known)}{stages if method else ""}.'
    )


def abstract_params(model: Model, image_size: Size) -> PyTree:
  """Shapes of a model's parameters for images of that size."""
  images = jax.ShapeDtypeStruct((1, *image_size, 3), np.float32)
  key = jax.eval_shape(lambda: jax.random.key(0))  # nothing runs
  return jax.eval_shape(model.init, key, images)['params']
