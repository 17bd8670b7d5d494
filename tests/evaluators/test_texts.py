"""Tests of zero-shot classification and of retrieval."""

import numpy as np

from vit_jax.data.tokens import canonical
from vit_jax.evaluators import retrieval


def test_ranks_count_what_is_as_near_as_the_own_one():
  """A caption among two of each image; equal similarities count as farther."""
  images = np.eye(3, dtype=np.float32)
  texts = np.array(
    [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0.5, 0.4], [0, 0, 1]], np.float32
  )
  owner = np.array([0, 0, 1, 2, 2])
  numbers = np.arange(3)
  ranks = retrieval._ranks(images, texts, numbers, owner)
  assert ranks.tolist() == [0, 1, 0]  # image 1 ties with a text of image 0
  ranks = retrieval._ranks(texts, images, owner, numbers)
  assert ranks.tolist() == [0, 2, 0, 1, 0]


def test_equal_embeddings_have_no_recall():
  same = np.ones((4, 2), np.float32)
  ranks = retrieval._ranks(same, same, np.arange(4), np.arange(4))
  assert ranks.tolist() == [3, 3, 3, 3]


def test_canonical_texts_are_those_of_siglip():
  text = canonical("A photo  of_a Cat's  nose. ")
  assert text == 'a photo of a cats nose'
