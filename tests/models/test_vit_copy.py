"""A copy of vit.py is a plug-in: the way to a model of your own."""

import importlib
import pathlib
import re

import jax
import numpy as np
import pytest
from tiny_vit import SIZES, images_of, noise_params

from tests import cli
from vit_jax.models import vit


@pytest.mark.slow
def test_the_attention_of_the_documentation(tmp_path, monkeypatch):
  """The three changes of docs/extending.md give a model with its parameters."""
  page = (cli.ROOT / 'docs/extending.md').read_text()
  layer = re.search(r'```python\n# in a copy.*?\n(.*?)```', page, re.S)[1]
  use = re.search(r'\nattend = (Sigmoid.*)\n', page)[1]
  text = pathlib.Path(vit.__file__).read_text()
  text = text.replace('class Block(', f'{layer}\n\nclass Block(')
  ours = re.compile(r'(?<=attend = )Attention\(.*?\n    \)', re.S)
  text = ours.sub(use, text, count=1)
  text = re.sub(r'return choose\(.*?\n    \)', "return 'XLA'", text, flags=re.S)
  (tmp_path / 'my_sigmoid.py').write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  model = importlib.import_module('my_sigmoid').Model(5, **SIZES)
  original = vit.Model(5, **SIZES)
  params, images = noise_params(model, (8, 8)), images_of(2, 8, 8)
  assert jax.tree.map(np.shape, params) == jax.tree.map(
    np.shape, noise_params(original, (8, 8))
  )
  want = ('attention',)
  out = model.apply({'params': params}, images, None, want, method='predict')
  weights = out['attention']
  assert weights.shape == (2, 3, 2, 5, 5) and (weights < 1).all()
  assert np.abs(weights.sum(-1) - 1).max() > 0.01
  assert model.computed_by((8, 8)) == 'attention by XLA'
