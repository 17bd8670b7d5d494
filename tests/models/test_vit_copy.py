"""A copy of vit.py is a plug-in: the way to a model of your own."""

import importlib
import os
import pathlib
import re

import jax
import numpy as np
import pytest
from tiny_vit import SIZES, images_of, noise_params

from tests import cli
from vit_jax.models import vit

# The second residual branch is subtracted.
OLD = "x = x + self._branch('scale2'"
NEW = "x = x - self._branch('scale2'"
CONFIG = """
from vit_jax.config import complete
from vit_jax.config.loading import load

def get_config():
  config = load('configs/quickstart.py')
  config.model.name = 'my_lab.vit'
  config.model.update(width=16, depth=1, mlp_dim=16, num_heads=2)
  config.update(total='2 steps', batch_size=8)
  config.evals.test.every = config.checkpoint.every = '2 steps'
  config.schedule.warmup = '0 steps'
  config.log.update(every='1 steps', curves=False, report=False)
  return complete(config)
"""


@pytest.mark.slow
def test_a_copy_with_one_changed_line_trains(tmp_path, monkeypatch):
  """It is named in a config, and the changed line takes effect."""
  text = pathlib.Path(vit.__file__).read_text()
  assert text.count(OLD) == 1
  (tmp_path / 'my_lab').mkdir()
  (tmp_path / 'my_lab/vit.py').write_text(text.replace(OLD, NEW))
  (tmp_path / 'my_lab/config.py').write_text(CONFIG)
  path = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
  monkeypatch.setenv('PYTHONPATH', path)
  flags = cli.flags(tmp_path / 'my_lab/config.py', tmp_path / 'run', {})
  cli.run(cli.command('train', *flags))
  losses = cli.losses(tmp_path / 'run')
  assert sorted(losses) == [1, 2] and np.isfinite([*losses.values()]).all()

  monkeypatch.syspath_prepend(tmp_path)
  copied = importlib.import_module('my_lab.vit').Model(5, **SIZES)
  original = vit.Model(5, **SIZES)
  params, images = noise_params(original, (8, 8)), images_of(2, 8, 8)
  ours, theirs = (
    model.apply({'params': params}, images) for model in (copied, original)
  )
  assert np.abs(ours - theirs).max() > 1e-2


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
