"""Tests of zero-shot classification and of retrieval."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from indexed_source import Shown, eval_setting

from vit_jax.data.augment import captions
from vit_jax.data.tokens import canonical
from vit_jax.errors import UserError
from vit_jax.evaluators import retrieval, zero_shot
from vit_jax.evaluators.features import Labelled
from vit_jax.models import vit
from vit_jax.objectives import contrastive
from vit_jax.objectives.contract import Setting

SIZES = dict(width=16, depth=1, mlp_dim=16, num_heads=2, dtype='float32')
TOY = str(
  pathlib.Path(__file__).parents[2] / 'configs' / 'lit_toy_tokenizer.json'
)
LABELS, NAMES = np.array([0, 2, 1, 1, 0]), ['cat', 'dog', 'ship']


def test_ranks_count_what_is_as_near_as_the_own_one():
  """A caption among two of each image; equal similarities count as farther."""
  texts = [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0.5, 0.4], [0, 0, 1]]
  texts = Labelled(np.array(texts), np.array([0, 0, 1, 2, 2]))
  images, same = (
    Labelled(x, np.arange(3)) for x in (np.eye(3), np.ones((3, 2)))
  )
  for queries, keys, expected in (
    (images, texts, [0, 1, 0]),  # image 1 ties with a text of image 0
    (texts, images, [0, 2, 0, 1, 0]),
    (same, same, [2, 2, 2]),
  ):
    assert retrieval._ranks(queries, keys).tolist() == expected


def test_canonical_texts_are_those_of_siglip():
  text = canonical("A photo  of_a Cat's  nose. ")
  assert text == 'a photo of a cats nose'


@pytest.mark.slow
def test_evaluators_apply_weights_to_images_and_texts():
  """Compares with embeddings of all images and texts at once, in NumPy."""
  model = vit.Model(0, patch_size=4, pool='gap', **SIZES)
  tower = SIZES | dict(vocabulary=45, length=6, variant=None)
  objective = contrastive.Objective(Setting(model, (4, 4)), text=tower)
  params, _ = objective.init(jax.random.key(0), None)
  texts = ['cat', 'one dog', 'a ship', 'the photo', 'a cat', 'good truck']
  texts = [texts[i : i + 1 + i % 2] for i in range(5)]
  source = Shown(LABELS, NAMES, text=texts)
  transform = captions.EvalTransform(
    (4, 4), tokenizer=TOY, length=6, vocabulary=45, captions_per_image=2
  )
  # Six texts and five images do not fill their last batches of 4.
  setting = eval_setting(source, batch_size=4)
  setting = setting._replace(objective=objective, transform=transform)

  def embedded(name, **batch):
    batch = {key: jnp.array(value) for key, value in batch.items()}
    return np.array(objective.predict(params, batch, (name,))[name])

  def tokens(texts):
    return np.stack([transform.tokens(text) for text in texts])

  pixels = np.stack([source[i]['image'] for i in range(5)])
  images = embedded('image', image=pixels)
  prompts = ('a photo of a {}', 'the {}')
  means = np.stack(
    [
      embedded('text', tokens=tokens([p.format(name) for p in prompts])).mean(0)
      for name in NAMES
    ]
  )
  means /= np.linalg.norm(means, axis=-1, keepdims=True)
  expected = ((images @ means.T).argmax(1) == LABELS).mean()
  zero = zero_shot.Evaluator(setting, split='test', prompts=prompts)
  assert zero.run(params) == {'accuracy': expected, 'count': 5}
  for wrong in ((), ('a {}', 'a photo')):
    with pytest.raises(UserError, match='{} in each prompt'):
      zero_shot.Evaluator(setting, split='test', prompts=wrong)
  # Other braces are ordinary characters.
  zero_shot.Evaluator(setting, split='test', prompts=('a {} of {0} {',))
  # A class of the labels would be the nearest to embeddings that are NaN.
  broken = params | {
    'model': jax.tree.map(lambda x: x * np.nan, params['model'])
  }
  assert zero.run(broken) == {'accuracy': 0, 'count': 5}

  flat = embedded('text', tokens=tokens(sum(texts, [])))
  owner = np.repeat(np.arange(5), [len(each) for each in texts])
  similar, own = images @ flat.T, np.arange(5)[:, None] == owner
  expected = {}
  for name, scores, is_own in (
    ('image_to_text', similar, own),
    ('text_to_image', similar.T, own.T),
  ):
    best = np.where(is_own, scores, -np.inf).max(1, keepdims=True)
    nearer = (~is_own & (scores >= best)).sum(1)  # two texts are equal
    expected |= {f'{name}@{k}': (nearer < k).mean() for k in (1, 5, 10)}
  assert len({*expected.values()}) > 2
  found = retrieval.Evaluator(setting, split='test').run(params)
  assert found == expected
