"""Tests of the documents: links, commands and Python blocks."""

import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from ml_collections import ConfigDict
from tiny_vit import save_classifier

from benchmarks import plan_configs
from tests import cli, shapes_folder
from vit_jax.config import predicted
from vit_jax.data.sources import pseudo_labels
from vit_jax.data.storage import parts
from vit_jax.launch import job as launch_job
from vit_jax.sweeps import grid

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
MAIN_FLAGS = {  # flags of every command
  flag
  for file in (ROOT / 'vit_jax').rglob('*.py')
  for pair in re.findall(
    r"(?:DEFINE_\w+|add_argument)\(\s*'(?:--)?(\w+)'|(\w+): .* = flag\(",
    file.read_text(),
  )
  for flag in pair
} | {*launch_job.FLAGS, 'checkpoint', 'step'}


def blocks(page: pathlib.Path, language: str) -> list[str]:
  """Returns the fenced blocks of a language."""
  return re.findall(rf'```{language}\n(.*?)```', page.read_text(), re.DOTALL)


def commands() -> list[tuple[str, list[str]]]:
  """Returns (page, words) of every command in blocks and in tables."""
  found = []
  for page in PAGES:
    text = '\n'.join(blocks(page, 'bash')).replace('\\\n', ' ')
    for line in text.splitlines():
      line = re.sub(r'\s+# .*', '', line)
      if line.startswith('python -m vit_jax.'):
        words = re.findall(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+", line)
        found.append((page.name, [word.replace("'", '') for word in words[2:]]))
    for span in re.findall(r'`([^`\n]+)`', page.read_text()):
      words = span.split()
      if words[0] in ('train', 'finetune', 'evaluate') and len(words) > 1:
        found.append((page.name, [f'vit_jax.{words[0]}', *words[1:]]))
  return found


@pytest.mark.slow
def test_commands_exist(command_line, tmp_path, tmp_path_factory):
  """Modules, flags, configs with their arguments, and keys are checked."""
  for name in ('cat', 'dog'):
    (tmp_path / name).mkdir()
    for i in range(20):
      (tmp_path / name / f'{i}.jpg').touch()
  scenes = tmp_path_factory.mktemp('scenes')
  shapes_folder.write(scenes)
  (tmp_path / 'pets.csv').write_text('image,label\na,cat|dog')
  (tmp_path / 'ages.csv').write_text('image,age,weight\na,1,2')
  labels = epath.Path(tmp_path / 'labels')
  copies = np.array([45_000])
  parts.save(labels / pseudo_labels.SELECTION, {'copies': copies})
  save_classifier(str(tmp_path / 'teacher.npz'))
  here = {
    'path=photos': f'path={tmp_path}',
    'path=scenes': f'path={scenes}',
    r'path=(\w+\.csv)': rf'path={tmp_path}/\1',
    'labels=labels': f'labels={labels}',
    'teacher=hf:facebook/dinov2-small': f'teacher={tmp_path}/teacher.npz',
  }
  seen = set()
  for page, (module, *arguments) in commands():
    assert importlib.util.find_spec(module), (page, module)
    own = [word for word in arguments if word.startswith('--')]
    for old, new in here.items():
      own = [re.sub(old, new, word) for word in own]
    for word in own:
      name = word[2:].partition('=')[0].partition('.')[0].removeprefix('no')
      assert name in MAIN_FLAGS | {'config'}, (page, word)
    if module in ('vit_jax.evaluate', 'vit_jax.predict', 'vit_jax.features'):
      continue  # their --config.KEY flags refer to a run's config
    if module in ('vit_jax.study', 'vit_jax.sweep'):
      (path,) = (w for w in own if w.startswith('--config='))
      kind = grid.Study if module == 'vit_jax.study' else grid.Sweep
      assert grid.load(path.removeprefix('--config='), kind), (page, path)
      continue
    if any(word.startswith('--config=configs') for word in own):
      config = command_line(*(w for w in own if w.startswith('--config')))
      assert config.batch_size > 0, (page, own)
      seen.add(next(w for w in own if w.startswith('--config=')))
  assert len(seen) > 10


@pytest.mark.slow
def test_python_blocks_run(tmp_path, monkeypatch):
  """A weight file and images are available to them."""
  monkeypatch.chdir(tmp_path)
  save_classifier('B_16.npz')
  count = 0
  for page in PAGES:
    for block in blocks(page, 'python'):
      if block.startswith('# in a copy'):
        continue  # tests/models/test_vit_copy.py runs it in a copy of vit.py
      images = jnp.asarray(np.zeros((1, 384, 384, 3), np.float32))
      names = {'images': images, 'config': ConfigDict({'evals': {}})}
      exec(compile(block, page.name, 'exec'), names)
      if 'logits' in names:
        assert names['logits'].shape == (1, 3)
      count += 1
  assert count >= 4


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_tour_runs():
  """The cells of the notebook are run one after another."""
  book = json.loads((ROOT / 'docs' / 'tour.ipynb').read_text())
  cells = [c['source'] for c in book['cells'] if c['cell_type'] == 'code']
  text = '\n'.join(''.join(cell) for cell in cells)
  out, _ = cli.run([sys.executable, '-c', text])
  assert '% of 64 images' in out


def test_the_readme_links_every_page():
  """index.md and reference.md belong to the site."""
  pages = {file.name for file in (ROOT / 'docs').iterdir() if file.is_file()}
  linked = re.findall(r'\(docs/([^)]+)\)', (ROOT / 'README.md').read_text())
  assert pages - {*linked} == {'index.md', 'reference.md', 'style.css'}


def test_predicted_costs_of_the_paper_page():
  """They are the output of `python benchmarks/plan_configs.py --table`."""
  page = (ROOT / 'docs' / 'paper.md').read_text()
  assert plan_configs.table(predicted.read()) in page


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
  """Links, anchors and references exist, and no page loads other sites."""
  build = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '-d', tmp_path]
  env = cli.environment() | {'NO_MKDOCS_2_WARNING': '1'}
  made = subprocess.run(
    build, cwd=ROOT, capture_output=True, text=True, env=env
  )
  assert made.returncode == 0, made.stderr[-3000:]
  pattern = r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]+)"'
  for page in tmp_path.glob('*.html'):
    fetched = re.findall(pattern, page.read_text())
    assert not fetched, (page.name, fetched)
