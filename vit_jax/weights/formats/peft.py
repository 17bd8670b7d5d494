"""LoRA as the library `peft` stores it: differences, without the frozen model.

A directory contains adapter_config.json and adapter_model.safetensors, whose
names are those of modules in `transformers` (since its major version 5 they
differ from the names in files of models, see `huggingface_models`). If this
package has written the directory, vit_jax.json contains the image size and the
names of the classes.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from vit_jax.arrays import sharding, tree
from vit_jax.config import schema
from vit_jax.errors import UserError
from vit_jax.files import paths
from vit_jax.models.vit import ViT
from vit_jax.weights import metadata, resizing
from vit_jax.weights import names as names_lib
from vit_jax.weights.contract import Pretrained
from vit_jax.weights.description import Description
from vit_jax.weights.formats import huggingface_models, tensors
from vit_jax.weights.names import NameMap, not_writable

PyTree = Any
_CONFIG, _FILE = 'adapter_config.json', 'adapter_model.safetensors'
_NOTES, _HEAD = 'vit_jax.json', 'head.safetensors'
_START, _LAYERS = 'base_model.model.', 'encoder/layers/'
# Types with a class for image classification, in which the model is a module
# with the name of the type, and the head is `classifier`.
_CLASSIFIERS = ('vit', 'deit', 'dinov2', 'dinov2_with_registers')
# Names of the modules above the layers, which differ between classes. Text
# towers keep theirs, because their layers have the names of the image tower's.
_ABOVE = re.compile(r'^(?!.*text_model).*?\.(?=(encoder\.)?layers?\.\d)')
# Keys whose other values change the function of an adapter.
_SUPPORTED = {
  'peft_type': 'LORA',
  'bias': 'none',
  'use_dora': False,
  'fan_in_fan_out': False,
  'alpha_pattern': {},
}
Find = Callable[[str, str], Pretrained]  # `pretrained.find`


def matches(path: str) -> dict[str, Any] | None:
  """Returns the adapter_config.json of a directory; None if it has none."""
  if tensors.is_file(path) and paths.locate(path).name != _FILE:
    return None
  folder = tensors.folder_of(path)
  if (folder / 'config.json').exists():
    return None  # a whole model, next to which an adapter may be
  return metadata.read(folder / _CONFIG) or None


def load(path: str, config: dict[str, Any] | None, find: Find) -> Pretrained:
  """Describes a model with an adapter, which is merged when it is loaded.

  Args:
    path: path of the directory, or of the file in it.
    config: result of `matches`, if it is known.
    find: `pretrained.find`, which opens the frozen model.

  Raises:
    UserError: the frozen model cannot be opened, or the adapter has options
      that are not supported, or does not fit it.
  """
  config, folder = config or matches(path), tensors.folder_of(path)
  if not config:
    raise UserError(f'{path} contains no {_CONFIG}: fetch the whole directory.')
  config = metadata.validated(folder / _CONFIG, config)
  others = {
    key: config[key]
    for key, value in _SUPPORTED.items()
    if (config.get(key) or value) != value  # null and {} are the default
  }
  if others:
    raise UserError(
      f'{path} contains an adapter of PEFT with {others}; {_SUPPORTED} are '
      'supported: merge it with its base by `peft.PeftModel.from_pretrained('
      f'base, "{folder}").merge_and_unload().save_pretrained("OUT")`; open OUT.'
    )
  notes = metadata.read_notes(_NOTES, metadata.read(folder / _NOTES))
  source = _base(path, config, find)
  if 'image_size' in notes:
    source = resizing.resized(source, tuple(notes['image_size']))
  arrays, _ = tensors.read(os.fspath(folder / _FILE))
  if (folder / _HEAD).exists():
    own, _ = tensors.read(os.fspath(folder / _HEAD))
    arrays |= {f'classifier.{name}': array for name, array in own.items()}
  arrays, head_params, values = _split_head(arrays, source, notes)
  description = dataclasses.replace(
    source.description,
    objective={'name': 'supervised'},
    config={},
    further={},
    source={},
    **values,
  )
  differences = _differences(path, config, arrays, source)

  def put(abstract: PyTree) -> PyTree:
    mesh = jax.tree.leaves(abstract)[0].sharding.mesh
    params = source.load(source.abstract_params(mesh))
    params = tree.flatten(source.backbone(params))
    changed = head_params | {
      name: sharding.to_host(params[name], mesh) + difference
      for name, difference in differences.items()
    }

    def leaf(name: str, shape: Any) -> jax.Array:
      if name in changed:
        return sharding.place(np.asarray(changed[name], np.float32), shape)
      return jax.device_put(params[name], shape.sharding)

    return tree.map_with_path(leaf, abstract)

  return Pretrained(path, description, put)


def _split_head(
  arrays: Mapping[str, np.ndarray], source: Pretrained, notes: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]:
  """Separates the head that an adapter contains from its differences.

  Args:
    arrays: all arrays of the adapter.
    source: frozen model.
    notes: result of `metadata.read_notes`.

  Returns:
    The other arrays; the head's parameters by path; and the values of the
    `Description` that the head changes. The latter two are empty if there is no
    head, which are two arrays `…classifier.weight` and `…classifier.bias`.
  """
  others = dict(arrays)
  weight = next((n for n in arrays if n.endswith('classifier.weight')), '')
  bias = f'{weight.removesuffix("weight")}bias'
  if not {weight, bias} <= arrays.keys():
    return others, {}, {}
  head = {
    'head/kernel': others.pop(weight).T,  # [inputs, outputs]
    'head/bias': others.pop(bias),
  }
  classes, width = len(head['head/bias']), source.model().width
  names = notes.get('class_names') or [f'class {i}' for i in range(classes)]
  section = {**source.description.model, 'pre_logits': False}
  # DINOv2's head in transformers also has the mean of the patches as input.
  if len(head['head/kernel']) == 2 * width:
    of_token, of_mean = np.split(head['head/kernel'], 2)
    if np.any(of_mean):
      section['pool'] = 'token_gap'
    else:  # padded by `save`
      head['head/kernel'] = of_token
  values = dict(model=section, num_classes=classes, class_names=tuple(names))
  return others, head, values


def _base(path: str, config: Mapping[str, Any], find: Find) -> Pretrained:
  """Opens the frozen model of an adapter.

  Raises:
    UserError: it is not named, or does not exist.
  """
  name = config.get('base_model_name_or_path')
  if not isinstance(name, str) or not name:
    raise UserError(
      f'{_CONFIG} of {path} does not name the frozen model: set its key '
      'base_model_name_or_path to a path or to a name of the Hugging Face Hub.'
    )
  is_hub = re.fullmatch(r'[\w.-]+/[\w.-]+', name) and not os.path.exists(name)
  return find(f'hf:{name}' if is_hub else name, 'params')


def _differences(
  path: str,
  config: Mapping[str, Any],
  arrays: Mapping[str, np.ndarray],
  source: Pretrained,
) -> dict[str, np.ndarray]:
  """Returns differences to the kernels of all layers, by path in the model.

  Raises:
    UserError: the adapter has other arrays, or arrays of other shapes.
  """
  names = NameMap(huggingface_models.VIT_NAMES)
  shapes = tree.shapes(source.backbone(source.abstract_params()))
  kernels = {
    name: shape
    for name, shape in shapes.items()
    if re.fullmatch(f'{_LAYERS}.*/kernel', name) and names.find(name)
  }
  # {current name of an array: its name in the file}
  given = {_ABOVE.sub('', name): name for name in arrays}
  given = names_lib.renamed(given, huggingface_models.VIT_ALIASES)
  # LoRA divides alpha by the rank, and rsLoRA by its square root.
  power = 0.5 if config.get('use_rslora') else 1
  products = {}  # differences with the names and the layout of transformers
  for name, shape in names.shapes(kernels).items():
    pair = [name.replace('weight', f'lora_{side}.weight') for side in 'AB']
    products[name] = np.zeros(shape, np.float32)
    if not {*pair} <= given.keys():
      continue
    # a: [rank, inputs]. b: [outputs, rank].
    a, b = (np.asarray(arrays[given[key]], np.float32) for key in pair)
    if a.shape[1:] == shape[1:] and b.shape == (shape[0], len(a)):
      scale = config.get('lora_alpha', 8) / len(a) ** power
      products[name] = scale * (b @ a)
      given = {key: given[key] for key in given if key not in pair}
  if given:
    unknown, modules = sorted(given.values()), names_lib.table('vit')
    supported = [path.removeprefix(_LAYERS) for path in modules]
    raise UserError(
      f'{path} contains arrays that do not fit the layers of {source.path}: '
      f'{", ".join(unknown[:3])} ({len(unknown)} in total). Supported is LoRA '
      f'for {", ".join(supported)} of a ViT; fc1 not of gated MLPs.'
    )
  result = names.native(products, kernels)
  return {name: array for name, array in result.items() if array.any()}


def save(path: str, params: PyTree, description: Description) -> None:
  """Writes an adapter that `peft` can load with its model of transformers.

  Args:
    path: path of the directory, which must not exist.
    params: parameters that a run with LoRA has trained.
    description: description of the run.

  Raises:
    UserError: the directory exists, the weights are not those of LoRA, or
      transformers has no equivalent model.
  """
  folder = paths.locate_new(path)
  if 'lora' not in params:
    raise not_writable('all of its parameters, only LoRA')
  model, run = description.built_model, description.config
  lora, kind = schema.build('lora', run['lora']), _kind(model)
  flat = tree.flatten(params['lora'])
  if lora.bias != 'none':
    raise not_writable(f'lora.bias={lora.bias!r}')
  if model.gated and any('mlp/fc1' in path for path in flat):
    raise not_writable('LoRA for fc1 of gated MLPs')
  # Whether the head is a module of the class in transformers; otherwise it is
  # written into a file of its own, which only this package reads.
  classifies = kind in _CLASSIFIERS and model.num_classes > 0
  start = _START + (f'{kind}.' if classifies else '')
  arrays, targets = {}, set()
  for path, leaf in flat.items():
    layer, _, side = path.rpartition('/')  # 'a' or 'b'
    name = names_lib.table(kind)[layer].name
    if model.gated:
      name = name.replace('.fc2', '.down_proj')
    targets.add(name.partition('{i}.')[2])
    for i, matrix in enumerate(np.asarray(leaf)):  # of layer i
      key = start + name.replace('{i}', str(i))
      matrix = np.ascontiguousarray(matrix.T)
      arrays[f'{key}.lora_{side.upper()}.weight'] = matrix
  head = _written_head(model, kind, params) if model.num_classes else {}
  if classifies:
    arrays |= {f'{_START}classifier.{k}': array for k, array in head.items()}
  config = dict(
    peft_type='LORA',
    base_model_name_or_path=run['init_from'].removeprefix('hf:'),
    r=lora.rank,
    lora_alpha=lora.alpha,
    lora_dropout=lora.dropout,
    bias='none',
    target_modules=sorted(targets),
    # SigLIP's head has modules of the same names.
    exclude_modules=r'(.*\.)?head\..*' if kind.startswith('siglip') else None,
    modules_to_save=['classifier'] if classifies else None,
    fan_in_fan_out=False,
    inference_mode=True,
  )
  notes = {
    'image_size': list(description.image_size),
    'class_names': list(description.class_names),
  }
  with paths.new_folder(folder) as unfinished:
    for name, content in ((_CONFIG, config), (_NOTES, notes)):
      (unfinished / name).write_text(json.dumps(content, indent=2))
    tensors.write(os.fspath(unfinished / _FILE), arrays, {})
    if head and not classifies:
      tensors.write(os.fspath(unfinished / _HEAD), head, {})


def _written_head(
  model: Any, kind: str, params: PyTree
) -> dict[str, np.ndarray]:
  """Returns the head as transformers expects it: `weight` and `bias`."""
  kernel, bias = (np.asarray(params['head'][k]) for k in ('kernel', 'bias'))
  if kind.startswith('dinov2') and model.pool == 'token':
    # The input of the head in transformers includes the mean of the patches.
    kernel = np.pad(kernel, ((0, model.width), (0, 0)))
  return {'weight': np.ascontiguousarray(kernel.T), 'bias': bias}


def _kind(model: Any) -> str:
  """Returns the type of a model in transformers.

  Raises:
    UserError: there is no equivalent type.
  """
  if isinstance(model, ViT) and model.pool == 'map':
    return 'siglip_vision_model'
  # The head is not a part of the adapter's type; see `save`.
  body = model.clone(num_classes=0) if isinstance(model, ViT) else model
  kind = huggingface_models.written(body).kind
  if model.distilled or (model.pool == 'gap' and model.num_classes):
    raise not_writable('a distillation token, or a head of the mean of patches')
  return kind
