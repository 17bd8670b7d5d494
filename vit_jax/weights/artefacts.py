"""Exports a model with its weights, for servers without this package.

The input is `images`, uint8 `[n, height, width, 3]` with any batch size, as
returned by the transform for evaluation, which `description.json` describes
(other channels, and uint16, for images that are not RGB with 8 bits).
The output is logits `[n, num_classes]`, float32 (features if there is no head),
or those of patches, `[n, rows, columns, classes]`, of the objective `segment`.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from etils import epath
from jaxtyping import Array, Float, UInt8, UInt16

from vit_jax.arrays import sharding
from vit_jax.config import schema
from vit_jax.errors import UserError, required
from vit_jax.files import paths
from vit_jax.objectives.contract import Setting
from vit_jax.weights.contract import Pretrained

# Platforms that a program is compiled for; it does not run on others.
_PLATFORMS = ('cpu', 'cuda', 'tpu')
Images = UInt8[Array, 'n y x c'] | UInt16[Array, 'n y x c']
Predict = Callable[[Images], Float[Array, 'n *map k']]
# Shape without the batch axis, `[height, width, channels]`, and dtype.
Spec = tuple[tuple[int, ...], np.dtype]


def predictor(source: Pretrained) -> Predict:
  """Returns the function to export, which contains the weights.

  Args:
    source: description of the weights.
  """
  mesh = sharding.make_mesh(jax.local_devices()[:1])
  params = jax.device_get(source.load_weights(mesh))
  params = jax.tree.map(jnp.asarray, params)  # without a mesh
  # Kernels run on one platform only, so they are left out.
  setting = Setting(source.model().reference, source.image_size)
  objective = schema.build('objective', source.description.objective, setting)
  # `classes` are the logits of each patch, of the objective `segment`.
  want = ('classes',) if 'classes' in objective.results else ()

  def predict(images: Images) -> Float[Array, 'n *map k']:
    found = objective.predict(params, {'image': images}, want)
    return found[want[0] if want else 'logits']

  return predict


def stablehlo(predict: Predict, images: Spec, folder: epath.Path) -> None:
  """Writes `model.stablehlo`, for `jax.export.deserialize`.

  Args:
    predict: function to export.
    images: shape and dtype of its images.
    folder: directory to write.
  """
  (batch,) = jax.export.symbolic_shape('n')
  shape, dtype = images
  spec = jax.ShapeDtypeStruct((batch, *shape), dtype)
  exported = jax.export.export(jax.jit(predict), platforms=_PLATFORMS)(spec)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'model.stablehlo').write_bytes(bytes(exported.serialize()))


def saved_model(predict: Predict, images: Spec, folder: epath.Path) -> None:
  """Writes a SavedModel whose signature maps `images` to `logits`.

  Args:
    predict: function to export.
    images: shape and dtype of its images.
    folder: directory to write.

  Raises:
    UserError: TensorFlow is not installed or is too old for this JAX.
  """
  tf = required('tensorflow', 'a SavedModel', 'vit_jax[tensorflow]')
  from jax.experimental import jax2tf

  converted = jax2tf.convert(
    predict,
    polymorphic_shapes=['(n, ...)'],
    native_serialization_platforms=_PLATFORMS,
    with_gradient=False,
  )
  shape, dtype = images
  spec = tf.TensorSpec((None, *shape), dtype, name='images')
  module: Any = tf.Module()
  module.serve = tf.function(
    lambda images: {'logits': converted(images)},
    input_signature=[spec],
    autograph=False,
  )
  # Otherwise, a program that is too new for TensorFlow would fail only on the
  # server.
  try:
    module.serve(tf.zeros((1, *shape), dtype))
  except tf.errors.InvalidArgumentError as error:
    raise UserError(
      f'TensorFlow {tf.__version__} cannot run programs of JAX '
      f'{jax.__version__}. Install a newer TensorFlow or an older JAX, or '
      'export --to=stablehlo.'
    ) from error
  signatures = {'serving_default': module.serve}
  tf.saved_model.save(module, os.fspath(folder), signatures=signatures)


KINDS = {'stablehlo': stablehlo, 'savedmodel': saved_model}


def description(source: Pretrained) -> dict[str, Any]:
  """Returns a description for servers, which is written as JSON.

  It contains input, output, preprocessing and class names.

  Args:
    source: description of the weights.
  """
  section = source.description.preprocess_section
  defaults = {
    key: parameter.default
    for key, parameter in schema.config_keys(
      schema.constructor('preprocess', section)
    ).items()
  }
  shape, dtype = source.description.transform().spec['image']
  return {
    'input': {
      'name': 'images',
      'dtype': dtype.name,
      'shape': ['n', *shape],
      'channels': 'RGB' if shape[-1] == 3 else shape[-1],
    },
    'output': {'name': 'logits', 'dtype': 'float32'},
    'preprocess': defaults | section,
    'class_names': list(source.description.class_names),
  }


def write(source: Pretrained, folder_path: str, kind: str) -> None:
  """Writes an artefact and its `description.json` into a new directory.

  Args:
    source: description of the weights.
    folder_path: directory to write, local or gs:// (local for a SavedModel).
    kind: a key of `KINDS`.

  Raises:
    UserError: the directory exists, or the weights cannot be loaded.
  """
  folder = paths.locate_new(folder_path)
  predict = predictor(source)
  text = json.dumps(description(source), indent=2)
  with paths.new_folder(folder) as unfinished:
    images = source.description.transform().spec['image']
    KINDS[kind](predict, images, unfinished)
    (unfinished / 'description.json').write_text(text)
