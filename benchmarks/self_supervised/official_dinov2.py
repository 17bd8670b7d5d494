"""Compares DINOv2 in this package with the authors' code.

  python -m benchmarks.self_supervised.official_dinov2 steps --code=DIR
  python -m benchmarks.self_supervised.official_dinov2 masks --code=DIR

DIR is a clone of github.com/facebookresearch/dinov2, which runs with PyTorch on
the CPU, without its other requirements: the functions of xformers are replaced
by plain ones, and modules without arithmetic (FSDP, logging, data loading) by
empty ones. Each command prints a Markdown table for benchmarks/RESULTS.md:

- steps: largest relative differences in the first ten steps of a tiny ViT,
  float32, with the same crops, masks and initial weights, on one and on eight
  devices. The settings are the defaults of the authors' config file, except
  sizes and durations; there is no drop path, which is random.
- masks: statistics of 10,000 masked crops.
"""

import argparse
import functools
import importlib
import importlib.util
import pathlib
import random
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import scipy.ndimage
import scipy.stats
import yaml

from benchmarks.real_weights import print_table
from vit_jax.arrays import sharding, tree
from vit_jax.config import loading
from vit_jax.config.schema import build_section
from vit_jax.data.augment.block_masks import TrainTransform
from vit_jax.models.vit import Model
from vit_jax.objectives import dinov2
from vit_jax.objectives.contract import Setting
from vit_jax.optim import optimizers
from vit_jax.optim.schedule import make_schedule
from vit_jax.training.step import Trainer
from vit_jax.weights.formats import timm_parsing

# The authors' batch of one GPU is a group here.
SIZE, LOCAL_SIZE, LOCAL_CROPS, SIDE, GROUP = 32, 16, 3, 4, 8
WIDTH, DEPTH, HEADS, SCALE = 16, 2, 2, 0.2
PROTOTYPES, HIDDEN, BOTTLENECK = (48, 32), 20, 8
# Durations in steps. The learning rate in a longer warm-up differs, see the
# header of configs/dinov2.py.
TOTAL, WARMUP, RISING, FROZEN, STEPS = 40, 1, 8, 4, 10
RATE = 1e-3
DEVICES = (1, 8)
CENTRING = {'centre': 'centering', 'sinkhorn_knopp': 'sinkhorn_knopp'}
HEAD_NAMES = {'head': 'dino_head', 'patch_head': 'ibot_head'}
# Sizes of the draws of masks: those of the short recipe.
GRID, MASK_GROUP, DRAWS = 14, 64, 10_000
# Modules that the authors' code imports, but does not need for the arithmetic.
UNUSED = (
  'fvcore.common.checkpoint',
  'dinov2.data',
  'dinov2.distributed',
  'dinov2.fsdp',
  'dinov2.logging',
  'dinov2.utils.config',
)


class Section(dict[str, Any]):
  """A section of the authors' config, with its keys also as attributes."""

  __getattr__ = dict.__getitem__


class BlockDiagonalMask:
  """Replaces the class of xformers: sequences attend only to themselves."""

  def __init__(self, lengths: list[int]):
    import torch

    self.lengths, self._batch_sizes = lengths, [1] * len(lengths)
    ones = [torch.ones(n, n, dtype=torch.bool) for n in lengths]
    self.allowed = torch.block_diag(*ones)

  @classmethod
  def from_seqlens(cls, lengths: list[int]) -> Any:
    """Returns the mask for sequences of these lengths."""
    return cls(lengths)

  @classmethod
  def from_tensor_list(cls, tensors: list[Any]) -> tuple[Any, Any]:
    """Returns the mask, and the tensors `[batch, tokens, …]` joined."""
    import torch

    made = cls([x.shape[1] for x in tensors for _ in range(len(x))])
    made._batch_sizes = [len(x) for x in tensors]
    rows = [x.reshape(1, -1, *x.shape[2:]) for x in tensors]
    return made, torch.cat(rows, dim=1)

  def split(self, x: Any) -> list[Any]:
    """Returns the tensors that were joined."""
    lengths, counts = iter(self.lengths), []
    for size in self._batch_sizes:
      counts.append(sum(next(lengths) for _ in range(size)))
    return [
      part.reshape(size, -1, *x.shape[2:])
      for size, part in zip(
        self._batch_sizes, x.split(counts, dim=1), strict=True
      )
    ]


def attention(q: Any, k: Any, v: Any, attn_bias: Any = None) -> Any:
  """Replaces xformers' attention of `[batch, tokens, heads, channels]`."""
  import torch.nn.functional as F

  q, k, v = (x.transpose(1, 2) for x in (q, k, v))
  allowed = None if attn_bias is None else attn_bias.allowed
  x = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
  return x.transpose(1, 2)


def import_authors(code: pathlib.Path) -> Any:
  """Returns the authors' module `dinov2.train.train`.

  Args:
    code: folder of their repository.
  """
  import torch

  ops = types.ModuleType('xformers.ops')
  replaced = dict(
    fmha=types.SimpleNamespace(BlockDiagonalMask=BlockDiagonalMask),
    memory_efficient_attention=attention,
    unbind=torch.unbind,
    scaled_index_add=None,  # of drop path
    index_select_cat=None,
  )
  for name, value in replaced.items():
    setattr(ops, name, value)
  sys.modules['xformers.ops'] = ops
  sys.modules |= {name: mock.MagicMock() for name in UNUSED}
  fsdp: Any = sys.modules['dinov2.fsdp']
  fsdp.get_fsdp_modules = lambda module: [
    types.SimpleNamespace(params=list(module.parameters()))
  ]
  sys.path.insert(0, str(code))
  # Their code moves batches to a GPU, and sums over all processes.
  mock.patch.object(torch.Tensor, 'cuda', lambda x, **_: x).start()
  torch.distributed.init_process_group(
    'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1
  )
  vits: Any = importlib.import_module('dinov2.models.vision_transformer')
  vits.vit_tiny = functools.partial(
    vits.DinoVisionTransformer,
    embed_dim=WIDTH,
    depth=DEPTH,
    num_heads=HEADS,
    block_fn=functools.partial(vits.Block, attn_class=vits.MemEffAttention),
  )
  return importlib.import_module('dinov2.train.train')


def data_module(code: pathlib.Path, name: str) -> Any:
  """Imports a module of the authors' data loading without its package."""
  path = code / f'dinov2/data/{name}.py'
  spec = importlib.util.spec_from_file_location(f'dinov2_{name}', path)
  assert spec is not None and spec.loader is not None
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def settings_of(code: pathlib.Path, centring: str, separate: bool) -> Section:
  """Returns the authors' default settings with small sizes and durations."""

  def sections(value: Any) -> Any:
    if not isinstance(value, dict):
      return value
    return Section({key: sections(each) for key, each in value.items()})

  file = code / 'dinov2/configs/ssl_default_config.yaml'
  cfg = sections(yaml.safe_load(file.read_text()))
  cfg.compute_precision.update(grad_scaler=False)
  cfg.student.update(arch='vit_tiny', patch_size=SIDE, drop_path_rate=0.0)
  cfg.crops.update(global_crops_size=SIZE, local_crops_number=LOCAL_CROPS)
  for section, outputs in zip((cfg.dino, cfg.ibot), PROTOTYPES, strict=True):
    section.update(
      head_n_prototypes=outputs,
      head_hidden_dim=HIDDEN,
      head_bottleneck_dim=BOTTLENECK,
    )
  cfg.ibot.update(separate_head=separate)
  cfg.train.update(centering=CENTRING[centring], OFFICIAL_EPOCH_LENGTH=1)
  cfg.teacher.update(warmup_teacher_temp_epochs=RISING)
  cfg.optim.update(
    epochs=TOTAL, warmup_epochs=WARMUP, freeze_last_layer_epochs=FROZEN, lr=RATE
  )
  return cfg


def collated(
  code: pathlib.Path, cfg: Section, side: int, batches: list[Any]
) -> list[dict[str, Any]]:
  """Returns batches with masks of the authors' generator.

  Args:
    code: folder of their repository.
    cfg: their settings.
    side: rows and columns of patches.
    batches: list of lists of examples.
  """
  import torch

  generator = data_module(code, 'masking').MaskingGenerator(
    input_size=(side, side), max_num_patches=0.5 * side * side
  )
  collate = data_module(code, 'collate').collate_data_and_cast
  random.seed(0)
  return [
    collate(
      [(example, None) for example in examples],
      tuple(cfg.ibot.mask_ratio_min_max),
      cfg.ibot.mask_sample_probability,
      torch.float32,
      n_tokens=side * side,
      mask_generator=generator,
    )
    for examples in batches
  ]


def batches_of(code: pathlib.Path, cfg: Section) -> list[dict[str, Any]]:
  """Returns random crops with masks.

  Crops have random colours and contrasts. With noise only, features would be so
  similar that rounding would determine the nearest neighbours of KoLeo.
  """
  import torch

  rng = np.random.default_rng(0)

  def crops(count: int, size: int) -> list[Any]:
    low, high = np.sort(rng.integers(0, 256, (2, count, 3, 1, 1)), axis=0)
    shape = (count, 3, size, size)
    pixels = rng.integers(low, high, shape, endpoint=True)
    return list(torch.tensor(pixels).float() / 127.5 - 1)

  def example() -> dict[str, Any]:
    local = crops(LOCAL_CROPS, LOCAL_SIZE)
    return dict(global_crops=crops(2, SIZE), local_crops=local)

  examples = [[example() for _ in range(GROUP)] for _ in range(STEPS)]
  return collated(code, cfg, SIZE // SIDE, examples)


def converted_batch(batch: dict[str, Any]) -> dict[str, np.ndarray]:
  """Returns a batch of the authors in our layout.

  Their crops are ordered by the number of the crop, and then by the image.
  """

  def rows(x: np.ndarray) -> np.ndarray:
    return x.reshape(-1, GROUP, *x.shape[1:]).swapaxes(0, 1)

  def pixels(x: Any) -> np.ndarray:
    levels = np.rint((x.numpy() + 1) * 127.5).astype(np.uint8)
    return rows(np.moveaxis(levels, 1, -1))

  return {
    'global': pixels(batch['collated_global_crops']),
    'local': pixels(batch['collated_local_crops']),
    'masks': rows(batch['collated_masks'].numpy()),
  }


def converted_params(module: Any, shapes: Any) -> Any:
  """Returns parameters of the authors' modules under our names.

  Args:
    module: student or teacher.
    shapes: shapes of our parameters.
  """
  arrays = {
    name: array.detach().numpy().copy()
    for name, array in module.state_dict().items()
  }
  backbone = {
    name.removeprefix('backbone.'): array for name, array in arrays.items()
  }
  expected = {k: v.shape for k, v in tree.flatten(shapes['model']).items()}
  params = {
    'model': tree.unflatten(timm_parsing.NAMES.native(backbone, expected)),
    'mask': backbone['mask_token'],
  }
  for ours, theirs in HEAD_NAMES.items():
    if ours not in shapes:
      continue
    last = f'{theirs}.last_layer.weight'
    params[ours] = {
      'last': {'kernel': arrays[f'{last}_v'].T, 'gain': arrays[f'{last}_g'].T}
    }
    for i in range(3):
      layer = f'{theirs}.mlp.{2 * i}'
      params[ours][f'fc{i + 1}'] = {
        'kernel': arrays[f'{layer}.weight'].T,
        'bias': arrays[f'{layer}.bias'],
      }
  return params


def authors_training(
  train: Any, cfg: Section, batches: list[dict[str, Any]]
) -> Iterator[tuple[Any, dict[str, float]]]:
  """Trains as `do_train` of the authors does.

  Yields:
    The model, and the losses of the last step; {} before the first step.
  """
  import torch

  torch.manual_seed(0)
  model = train.SSLMetaArch(cfg)
  model.need_to_synchronize_fsdp_streams = False
  for name, parameter in model.student.named_parameters():
    # No parameter is 0, so that each has an effect. Lengths of prototypes are
    # positive.
    noise = SCALE * torch.randn_like(parameter)
    is_length = name.endswith('weight_g')
    parameter.data.copy_((1 + noise).abs() if is_length else noise)
  model.teacher.load_state_dict(model.student.state_dict())
  model.train()
  optimizer = train.build_optimizer(cfg, model.get_params_groups())
  lr, decay, momentum, temperature, last_lr = train.build_schedulers(cfg)
  yield model, {}
  for step, batch in enumerate(batches):
    train.apply_optim_scheduler(optimizer, lr[step], decay[step], last_lr[step])
    optimizer.zero_grad(set_to_none=True)
    losses = model.forward_backward(batch, teacher_temp=temperature[step])
    for module in model.student.values():
      # FSDP's method of the same name computes the norm over all GPUs.
      clip = torch.nn.utils.clip_grad_norm_
      clip(module.parameters(), cfg.optim.clip_grad)
    optimizer.step()
    model.update_teacher(momentum[step])
    # They update the centres before they use them again.
    model.dino_loss.apply_center_update()
    model.ibot_patch_loss.apply_center_update()
    yield model, {name: float(loss) for name, loss in losses.items()}


def comparable_losses(losses: dict[str, float]) -> list[float]:
  """Returns our losses, computed from those that the authors log."""
  crop = losses['dino_local_crops_loss'] + losses['dino_global_crops_loss']
  patch, koleo = 2 * losses['ibot_loss'], 2 * losses['koleo_loss']
  return [crop + patch + koleo, crop, patch, koleo / 0.1]


def objective_of(centring: str, separate: bool) -> Any:
  """Builds our objective."""
  model = Model(
    0,
    patch_size=SIDE,
    width=WIDTH,
    depth=DEPTH,
    mlp_dim=4 * WIDTH,
    num_heads=HEADS,
    gelu='exact',
    layer_scale=1e-5,
    pool='token',
    dtype='float32',
  )
  transform: Any = TrainTransform(
    (SIZE, SIZE),
    patch_size=SIDE,
    local_crops=LOCAL_CROPS,
    local_size=(LOCAL_SIZE,),
  ).in_batches(GROUP, 1)
  heads = [
    dict(
      outputs=outputs,
      hidden=HIDDEN,
      bottleneck=BOTTLENECK,
      dtype='float32',
      norm_last_layer=False,
    )
    for outputs in PROTOTYPES
  ]
  return dinov2.Objective(
    Setting(model, (SIZE, SIZE), steps=steps_of, transform=transform),
    centring=centring,
    temperature_warmup=f'{RISING} steps',
    head=heads[0],
    patch_head=heads[1] if separate else None,
  )


def steps_of(duration: str) -> int:
  """Converts a duration to steps; an epoch is a step."""
  number, unit = duration.split(' ')
  return round(float(number) * (TOTAL / 100 if unit == '%' else 1))


def optimizer_of(of: dinov2.Objective) -> tuple[Any, Any]:
  """Builds the optimizer of the shipped config, and the learning rate."""
  config = loading.load('configs/dinov2.py:recipe=short,model=S')
  with config.unlocked():
    *rules, (last, _) = config.optimizer.rules
    delay = last, dict(lr_after=f'{FROZEN} steps')
    config.optimizer.rules = (*rules, delay)
  schedule = make_schedule(
    TOTAL, lambda _: WARMUP, base_lr=RATE, decay='cosine', end_lr=1e-6
  )
  setting = optimizers.Setting(steps_of, of.layers_above)
  return build_section(config, 'optimizer', schedule, setting), schedule


def relative(ours: Any, theirs: Any) -> float:
  """Returns the largest difference of any array, relative to its largest value.

  The bias of keys is left out. It adds the same number to all logits of a
  query, so its gradient is 0, and Adam scales rounding errors to whole steps.
  """
  flat = tree.flatten(theirs)
  return max(
    float(
      np.abs(np.asarray(leaf) - flat[path]).max() / np.abs(flat[path]).max()
    )
    for path, leaf in tree.flatten(ours).items()
    if not path.endswith('key/bias')
  )


def differences(
  train: Any, code: pathlib.Path, centring: str, separate: bool, devices: int
) -> np.ndarray:
  """Returns the largest differences of losses, student, teacher and centres."""
  of = objective_of(centring, separate)
  shapes, _ = jax.eval_shape(of.init, jax.random.key(0), None)
  cfg = settings_of(code, centring, separate)
  batches = batches_of(code, cfg)
  training = authors_training(train, cfg, batches)
  model, _ = next(training)
  params = converted_params(model.student, shapes)
  mesh = sharding.make_mesh(jax.devices()[:devices], data=devices)
  trainer = Trainer(of, *optimizer_of(of), 1, None)
  rows = []
  with jax.set_mesh(mesh):
    state = trainer.state_of(params, of.start_extra(params, {}))
    shardings = sharding.shardings(state, mesh, of.sharding_rules)
    state = jax.device_put(state, shardings)
    step = jax.jit(trainer.train_step, out_shardings=(shardings, None))
    for batch, (model, losses) in zip(batches, training, strict=True):
      split = sharding.batch_sharding(mesh)
      batch = jax.device_put(converted_batch(batch), split)
      state, metrics = step(state, batch, jax.random.key(0), {})
      names = ('loss', 'crop_loss', 'patch_loss', 'koleo')
      extra = dict(state.extra)
      teacher = extra.pop('teacher')
      centres = {
        'centre': model.dino_loss.center[0].numpy(),
        'patch_centre': model.ibot_patch_loss.center[0, 0].numpy(),
      }
      rows.append(
        [
          relative(
            [metrics[name] for name in names],
            [np.array(loss) for loss in comparable_losses(losses)],
          ),
          relative(state.params, converted_params(model.student, shapes)),
          relative(teacher, converted_params(model.teacher, shapes)),
          relative(extra, centres) if extra else np.nan,
        ]
      )
  return np.max(rows, axis=0)


def steps(code: pathlib.Path) -> None:
  """Compares ten steps."""
  jax.config.update('jax_num_cpu_devices', max(DEVICES))
  train = import_authors(code)
  rows = []
  for centring in dinov2.CENTRING:
    for separate in (False, True):
      for devices in DEVICES:
        found = differences(train, code, centring, separate, devices)
        numbers = ['' if np.isnan(x) else f'{x:.1e}' for x in found]
        heads = 'separate' if separate else 'shared'
        rows.append([centring, heads, str(devices), *numbers])
  columns = ['losses', 'student', 'teacher', 'centres']
  print_table(['targets', 'heads', 'devices', *columns], rows)


def our_masks(groups: int) -> np.ndarray:
  """Returns masks `[groups, crops, y, x]` of our transform."""
  of = TrainTransform(
    (2 * GRID, 2 * GRID), patch_size=2, group=MASK_GROUP, local_crops=0
  ).in_batches(MASK_GROUP, 1)
  image = np.zeros((2 * GRID, 2 * GRID, 3), np.uint8)
  masks = []
  for position in range(groups * MASK_GROUP):
    example = dict(image=image, run_seed=0, run_position=position)
    rng = np.random.default_rng([0, position])
    masks.append(of(example, rng)['masks'])
  return np.array(masks).reshape(groups, -1, GRID, GRID)


def their_masks(code: pathlib.Path, groups: int) -> np.ndarray:
  """Returns masks `[groups, crops, y, x]` of the authors' code."""
  import torch

  cfg = settings_of(code, 'centre', False)
  empty = [torch.zeros(1)]
  example = dict(global_crops=2 * empty, local_crops=empty)
  batches = collated(code, cfg, GRID, groups * [MASK_GROUP * [example]])
  masks = [batch['collated_masks'].numpy() for batch in batches]
  return np.array(masks).reshape(groups, -1, GRID, GRID)


def statistics(masks: np.ndarray) -> dict[str, np.ndarray]:
  """Returns statistics of masks, each a number per group, crop or block.

  A block is a set of masked patches that are connected by their sides; it
  consists of one or several rectangles.
  """
  found = {'masked crops of a group': masks.any((2, 3)).sum(1)}
  masked = masks[masks.any((2, 3))]
  blocks: Any = [scipy.ndimage.label(mask) for mask in masked]
  boxes = [
    box for labels, _ in blocks for box in scipy.ndimage.find_objects(labels)
  ]
  height, width = (
    np.array([box[axis].stop - box[axis].start for box in boxes])
    for axis in (0, 1)
  )
  padded = np.pad(masked, ((0, 0), (1, 1), (1, 1))).astype(int)
  edges = sum(np.abs(np.diff(padded, axis=axis)).sum((1, 2)) for axis in (1, 2))
  return found | {
    'masked patches of a crop, %': 100 * masked.mean((1, 2)),
    'blocks of a crop': np.array([count for _, count in blocks]),
    'edges of the masked area of a crop': np.asarray(edges),
    'height of a block': height,
    'width of a block': width,
    'ln(height / width) of a block': np.log(height / width),
    'masked patches of the first row, %': 100 * masked[:, 0].mean(1),
    'masked patches of the middle row, %': 100 * masked[:, GRID // 2].mean(1),
  }


def masks(code: pathlib.Path) -> None:
  """Compares masks."""
  groups = -(-DRAWS // MASK_GROUP)
  ours = statistics(our_masks(groups))
  theirs = statistics(their_masks(code, groups))
  rows = []
  for name, values in ours.items():
    both = values, theirs[name]
    # The largest difference of the two distribution functions.
    distance: Any = scipy.stats.ks_2samp(*both)
    numbers = [f'{x.mean():.2f} ± {x.std():.2f}' for x in both]
    rows.append([name, *numbers, f'{distance.statistic:.4f}'])
  print_table(['statistic', 'vit_jax', 'authors', 'distance'], rows)


def main() -> None:
  """Runs one comparison."""
  parser = argparse.ArgumentParser()
  parser.add_argument('command', choices=('steps', 'masks'))
  parser.add_argument('--code', required=True, type=pathlib.Path)
  given = parser.parse_args()
  command = steps if given.command == 'steps' else masks
  command(given.code)


if __name__ == '__main__':
  main()
