"""Tests of principal components of filters and similarity of positions."""

import numpy as np
from sklearn.decomposition import PCA

from vit_jax.analysis import figures


def test_principal_components_equal_scikit_learn():
  kernel = np.random.default_rng(0).normal(size=(4, 4, 3, 90)) ** 3
  kernel = kernel.astype(np.float32)
  filters, fractions = figures.components(kernel)
  reference = PCA(28, svd_solver='full').fit(kernel.reshape(48, 90).T)
  ours = filters.reshape(28, 48)
  cosines = np.abs((ours * reference.components_).sum(1))
  np.testing.assert_allclose(cosines, 1, atol=1e-5)
  np.testing.assert_allclose(
    fractions, reference.explained_variance_ratio_, rtol=1e-5
  )
  peaks = ours[np.arange(28), np.abs(ours).argmax(1)]
  assert (peaks > 0).all()


def test_filters_are_those_of_rgb_pixels():
  """From the patch embedding, or a hybrid's first convolution in the stem."""
  leaves = {
    'encoder/layers/attention/query/kernel': np.zeros((5, 48, 3, 16)),
    'embedding/kernel': np.zeros((4, 4, 3, 48)),
  }
  assert figures.first_kernel(leaves).shape == (4, 4, 3, 48)
  leaves['embedding/kernel'] = np.zeros((1, 1, 64, 48))
  assert figures.first_kernel(leaves) is None
  leaves['stem/conv_root/kernel'] = np.zeros((7, 7, 3, 64))
  assert figures.first_kernel(leaves).shape == (7, 7, 3, 64)


def test_position_similarity_by_hand():
  """The positions are at angles of 0, 180, 90 and 60 degrees to the first."""
  table = np.array([[1, 0], [-3, 0], [0, 2], [0.5, 0.75**0.5]])
  found = figures.similarity(table, (2, 2))
  np.testing.assert_allclose(found[0, 0], [[1, -1], [0, 0.5]], atol=1e-12)
  np.testing.assert_allclose(found, found.transpose(2, 3, 0, 1))


def test_positions_are_those_of_the_patches():
  """Without the class token; or of rows and columns, in the first layer."""
  table = np.arange(14.0).reshape(1, 7, 2)
  found = figures.positions({'position/embedding': table}, (2, 3))
  np.testing.assert_array_equal(found, table[0, 1:])
  leaves = {
    'encoder/layers/position/rows': np.array([[[1.0], [2]], [[8], [9]]]),
    'encoder/layers/position/columns': np.array([[[3.0], [4], [5]]] * 2),
  }
  found = figures.positions(leaves, (2, 3))
  assert found.tolist() == [[1, 3], [1, 4], [1, 5], [2, 3], [2, 4], [2, 5]]
