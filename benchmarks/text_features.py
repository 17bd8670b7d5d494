"""Trains text towers on frozen features of CIFAR-10 (LiT).

  python -m vit_jax.features --checkpoint=WEIGHTS --dataset=cifar10
    --data_dir=DATA --image_size=112 --config.preprocess.central_fraction=1.0
    --split=train[:2000] --out=train
  (and --split=test[:2000] --out=test)
  python -m benchmarks.text_features train test

WEIGHTS are those of benchmarks/real_weights.py. The script prints a Markdown
table for benchmarks/RESULTS.md: accuracy of zero-shot classification with the
templates of the training captions and with others, next to a linear probe of
the same features. Text tower, captions, templates and values are those of
configs/lit_toy.py:data=cifar10,tower=locked. The image tower does not change,
so its features are computed once, and not in each of 40 epochs.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.real_weights import by_scikit_learn, print_table
from configs import lit_toy
from vit_jax import read_features
from vit_jax.config import loading
from vit_jax.data.augment import captions
from vit_jax.models import vit
from vit_jax.objectives import contrastive
from vit_jax.objectives.contract import Inputs, Setting
from vit_jax.optim import optimizers

SEEDS, EPOCHS = 3, 40
PyTree = Any


class Objective(contrastive.Objective):
  """The shipped objective, for batches with the features of images."""

  def embed(self, params: PyTree, inputs: Inputs) -> Any:
    """Returns embeddings; `image` contains features."""
    images = self._image(params, inputs.batch['image'])
    return images, self._texts(params, inputs.batch['tokens'])


def tokens_of(config: Any, templates: tuple[str, ...]) -> np.ndarray:
  """Returns tokens of each class and template, `[classes, templates, t]`."""
  keys = {k: v for k, v in config.preprocess.items() if k != 'name'}
  transform = captions.EvalTransform((32, 32), **keys)
  names = config.augment.classes
  rows = [
    [transform.tokens(text.format(name)) for text in templates]
    for name in names
  ]
  return np.array(rows)


def train(
  objective: Objective, config: Any, x: np.ndarray, y: np.ndarray, seed: int
) -> PyTree:
  """Trains the text tower; returns its parameters."""
  rng, texts = np.random.default_rng(seed), tokens_of(config, lit_toy.TEMPLATES)
  params, _ = objective.init(jax.random.key(seed), None)
  size = config.batch_size
  steps = EPOCHS * (len(x) // size)
  rate = optax.warmup_cosine_decay_schedule(
    0, config.schedule.base_lr, steps // 20, steps
  )
  keys = {k: v for k, v in config.optimizer.items() if k != 'name'}
  optimizer = optimizers.adam(rate, **keys)
  state = optimizer.init(params)

  @jax.jit
  def step(params: PyTree, state: PyTree, batch: Any) -> Any:
    inputs = Inputs({}, batch, jax.random.key(0), jnp.int32(0), {})
    slopes, _ = jax.grad(objective.loss, has_aux=True)(params, inputs)
    updates, state = optimizer.update(slopes, state, params)
    return optax.apply_updates(params, updates), state

  for _ in range(EPOCHS):
    order = rng.permutation(len(x))
    for rows in order[: len(x) // size * size].reshape(-1, size):
      drawn = rng.integers(len(lit_toy.TEMPLATES), size=size)
      batch = {'image': x[rows], 'tokens': texts[y[rows], drawn]}
      params, state = step(params, state, batch)
  return params


def zero_shot(
  objective: Objective, params: PyTree, tokens: Any, x: Any, y: Any
) -> float:
  """Returns the accuracy, as the evaluator zero_shot computes it."""
  texts = objective.predict(params, {'tokens': tokens}, ('text',))['text']
  return float(((x @ texts.mean(1).T).argmax(1) == y).mean())


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser()
  parser.add_argument('train', help='features and labels, a directory')
  parser.add_argument('test', help='features and labels, a directory')
  given = parser.parse_args()
  config = loading.load('configs/lit_toy.py:data=cifar10,tower=locked')
  parts = [read_features(path) for path in (given.train, given.test)]
  (x, y), (test_x, test_y) = ((p['features'], p['label']) for p in parts)
  model = vit.Model(0, patch_size=16, **lit_toy.SMALL | {'width': x.shape[1]})
  keys = {k: v for k, v in config.objective.items() if k != 'name'}
  objective = Objective(Setting(model, (16, 16)), **keys)
  probe = by_scikit_learn(x, y, test_x, test_y)['linear probe']
  rows = []
  for seed in range(SEEDS):
    params = train(objective, config, x, y, seed)
    accuracies = [
      zero_shot(objective, params, tokens_of(config, texts), test_x, test_y)
      for texts in (lit_toy.TEMPLATES, lit_toy.PROMPTS)
    ]
    cells = [f'{100 * value:.1f}' for value in (*accuracies, probe)]
    rows.append([str(seed), *cells])
  columns = ['seed', 'same templates', 'other templates', 'linear probe']
  print_table(columns, rows)


if __name__ == '__main__':
  main()
