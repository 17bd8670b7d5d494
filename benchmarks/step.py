"""Measures training and inference throughput on this machine.

  python benchmarks/step.py --variants=Ti/16,S/16 --against=flax,torch
  python benchmarks/step.py --variants=B/16,L/16 --batch=256 --against=timm

Measures this package's training step (Adam, sigmoid loss, 1,000 classes, random
images, no dropout) and its inference, alternating in the same run with the
peers of `--against`:

  flax   a plain Flax ViT: layers in a Python loop, Flax's own attention, Optax
  torch  Hugging Face's ViT under torch.compile (needs transformers)
  timm   timm's ViT under torch.compile (needs timm)
  timm_eager  the same without torch.compile

The dtype is float32 on a CPU and bfloat16 on a GPU (autocast and fused AdamW
for torch). Figures are medians over `--rounds` rounds of `--steps` steps. MFU
needs a known device.
"""

import argparse
import importlib.metadata
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peers
import plain_flax

from vit_jax.arrays import devices, sharding
from vit_jax.config import loading
from vit_jax.models import vit
from vit_jax.plan.compile import changed
from vit_jax.processes import machine
from vit_jax.training import compiling
from vit_jax.training.experiment import Experiment

CLASSES, SIZE = 1000, 224
Step = Callable[[], None]  # runs one step and does not wait for it


class Ours:
  """This package, with its own config, experiment and compiled step."""

  name = 'vit_jax'

  def __init__(self, variant: str, batch: int, dtype: str, **model: Any):
    config = loading.load('configs/l16_i21k.py')
    model = {f'model__{key}': value for key, value in model.items()}
    config = changed(
      config,
      model__variant=variant,
      model__dtype=dtype,
      model__dropout=0.0,
      batch_size=batch,
      num_classes=CLASSES,
      micro_batches=1,
      **model,
    )
    self._experiment = Experiment.build(config, jax.devices()[:1])
    mesh = jax.set_mesh(self._experiment.mesh)
    with mesh:
      self._step = compiling.compile_step(self._experiment)
      self._key = sharding.random_key(config.seed, self._experiment.mesh)
      self._frozen: dict[str, Any] = {}  # no weights but the model's
      shardings = jax.tree.map(
        lambda leaf: leaf.sharding, self._experiment.abstract_state
      )
      init = jax.jit(self._experiment.init_state, out_shardings=shardings)
      self._state = init(self._key)
      self._batch = jax.device_put(
        _batch(batch),
        jax.tree.map(lambda x: x.sharding, self._experiment.abstract_batch()),
      )
    self._predict = jax.jit(self._experiment.trainer.objective.predict)
    self._out: Any = None

  def train(self) -> None:
    with jax.set_mesh(self._experiment.mesh):
      self._state, self._out = self._step(
        self._state, self._batch, self._key, self._frozen
      )

  def infer(self) -> None:
    with jax.set_mesh(self._experiment.mesh):
      self._out = self._predict(self._state.params, self._batch)['logits']

  def wait(self) -> None:
    jax.block_until_ready((self._out, self._state))


class Flax:
  """The plain ViT with its layers in a loop."""

  name = 'flax'

  def __init__(self, variant: str, batch: int, dtype: str):
    model = plain_flax.Plain(variant, CLASSES, jnp.dtype(dtype))
    init, step = plain_flax.training(model)
    host = _batch(batch)
    self._images = jnp.asarray(host['image']) / 127.5 - 1.0
    self._labels = jnp.asarray(host['label'])
    self._state = init(self._images)
    self._train = jax.jit(step, donate_argnums=0)
    self._infer = jax.jit(model.apply)
    self._out: Any = None

  def train(self) -> None:
    self._state, self._out = self._train(
      self._state, self._images, self._labels
    )

  def infer(self) -> None:
    self._out = self._infer(self._state[0], self._images)

  def wait(self) -> None:
    jax.block_until_ready((self._out, self._state))


class Torch:
  """A PyTorch model; autocast and fused AdamW on a GPU.

  It runs under torch.compile, except if the name ends with `_eager`.
  """

  def __init__(self, name: str, variant: str, batch: int):
    import torch

    self.name = name
    self._torch = torch
    self._cuda = torch.cuda.is_available()
    device = 'cuda' if self._cuda else 'cpu'
    torch.set_float32_matmul_precision('high')
    family, _, eager = name.partition('_')
    build = {'timm': _timm, 'torch': _hugging_face}[family]
    model = build(variant).to(device)
    self._model = model if eager else torch.compile(model)
    self._optimizer = torch.optim.AdamW(model.parameters(), fused=self._cuda)
    host = _batch(batch)
    images = torch.from_numpy(host['image']).to(device).permute(0, 3, 1, 2)
    self._images = images.float().div(127.5).sub(1.0).contiguous()
    labels = torch.from_numpy(host['label']).long().to(device)
    self._targets = torch.nn.functional.one_hot(labels, CLASSES).float()
    self._out: Any = None

  def _logits(self) -> Any:
    kind = 'cuda' if self._cuda else 'cpu'
    with self._torch.autocast(kind, self._torch.bfloat16, enabled=self._cuda):
      logits = self._model(self._images)
    return getattr(logits, 'logits', logits)

  def train(self) -> None:
    self._model.train()
    loss = self._torch.nn.functional.binary_cross_entropy_with_logits(
      self._logits().float(), self._targets, reduction='sum'
    ) / len(self._targets)
    self._optimizer.zero_grad(set_to_none=True)
    loss.backward()
    self._optimizer.step()

  def infer(self) -> None:
    self._model.eval()
    with self._torch.inference_mode():
      self._out = self._logits()

  def wait(self) -> None:
    if self._cuda:
      self._torch.cuda.synchronize()


def _timm(variant: str) -> Any:
  names = dict(Ti='tiny', S='small', B='base', L='large', H='huge')
  letter, patch = variant.split('/')
  timm = peers.import_timm()
  return timm.create_model(f'vit_{names[letter]}_patch{patch}_224')


def _hugging_face(variant: str) -> Any:
  import transformers

  size = vit.VARIANTS[variant]
  config = transformers.ViTConfig(
    hidden_size=size['width'],
    num_hidden_layers=size['depth'],
    num_attention_heads=size['num_heads'],
    intermediate_size=size['mlp_dim'],
    patch_size=size['patch_size'],
    num_labels=CLASSES,
  )
  return transformers.ViTForImageClassification(config)


def _batch(batch: int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  return {
    'image': rng.integers(0, 256, (batch, SIZE, SIZE, 3), np.uint8),
    'label': rng.integers(0, CLASSES, batch, np.int32),
  }


def measure(
  sides: list[Any], kind: str, steps: int, rounds: int
) -> dict[str, float]:
  """Returns the median seconds per step of each peer, in alternation."""
  for side in sides:
    for _ in range(3):
      getattr(side, kind)()
    side.wait()
  seconds: dict[str, list[float]] = {side.name: [] for side in sides}
  for _ in range(rounds):
    for side in sides:
      start = time.perf_counter()
      for _ in range(steps):
        getattr(side, kind)()
      side.wait()
      seconds[side.name].append((time.perf_counter() - start) / steps)
  return {name: statistics.median(times) for name, times in seconds.items()}


def rows(arguments: argparse.Namespace, variant: str) -> Iterator[str]:
  """Returns the lines of the table for one variant."""
  gpu = jax.devices()[0].platform == 'gpu'
  dtype = arguments.dtype or ('bfloat16' if gpu else 'float32')
  batch = arguments.batch
  sides: list[Any] = [Ours(variant, batch, dtype, remat=arguments.remat)]
  for name in filter(None, arguments.against.split(',')):
    if name == 'flax':
      sides.append(Flax(variant, batch, dtype))
    else:
      sides.append(Torch(name, variant, batch))
  image_flops = sides[0]._experiment.image_flops / 3  # FLOPs of a forward pass
  peak = devices.peak_flops(jax.devices()[0].device_kind)
  for kind, passes in (('train', 3), ('infer', 1)):
    seconds = measure(sides, kind, arguments.steps, arguments.rounds)
    ours = seconds[sides[0].name]
    for name, value in seconds.items():
      rate = batch / value
      mfu = f'{100 * rate * passes * image_flops / peak:.1f}' if peak else ''
      ratio = '' if name == sides[0].name else f'{value / ours:.2f}'
      cells = (variant, kind, batch, name, f'{rate:,.1f}', mfu, ratio)
      yield f'| {" | ".join(map(str, cells))} |'
  stats = jax.devices()[0].memory_stats() or {}
  if 'peak_bytes_in_use' in stats:
    gib = stats['peak_bytes_in_use'] / 2**30
    yield f'peak device memory of JAX so far: {gib:.2f} GiB'


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--variants', default='Ti/16,S/16')
  parser.add_argument('--batch', type=int, default=16)
  parser.add_argument('--against', default='flax')
  parser.add_argument('--dtype', choices=('float32', 'bfloat16'))
  parser.add_argument('--remat', default='none')
  parser.add_argument('--steps', type=int, default=3)
  parser.add_argument('--rounds', type=int, default=5)
  arguments = parser.parse_args()
  machine.keep_host_memory()  # as in our commands; all peers benefit
  versions = {
    name: importlib.metadata.version(name)
    for name in ('jax', 'flax', 'torch', 'timm', 'transformers')
    if importlib.util.find_spec(name)
  }
  print(jax.devices()[0].device_kind, versions)
  print('| model | pass | batch | by | img/s | MFU % | vit_jax over it |')
  print('|---|---|---|---|---|---|---|', flush=True)
  for variant in arguments.variants.split(','):
    for line in rows(arguments, variant):
      print(line, flush=True)


if __name__ == '__main__':
  main()
