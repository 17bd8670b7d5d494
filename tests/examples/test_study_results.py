"""Tests of the script that draws the figure of a study."""

import json
import pathlib

import numpy as np
import pytest
from finished_runs import finish

from examples import study_results
from examples.study_results import Figure
from vit_jax.errors import UserError
from vit_jax.sweeps import grid
from vit_jax.sweeps.grid import Number, Row, Stage, Study, Task

CONFIG = 'configs/quickstart.py'
UPSTREAM = Stage(CONFIG, 'test/accuracy')


def make_ready(study, workdir):
  """Returns the jobs that can start, with all weights given."""
  for name in study.rows:
    (workdir / name / 'given').mkdir(parents=True, exist_ok=True)
  graph = study_results.graph_of(study, str(workdir))
  jobs = [j for row in graph.values() for found in row.values() for j in found]
  return [job for job in jobs if job.is_ready]


def test_figure_orders_points_by_x(tmp_path):
  """Published points are in separate arrays."""
  paper = {'pre-training': Number(60)}
  rows = {
    'big': Row(pretrain=UPSTREAM._replace(seeds=(0, 1))),
    'small': Row(pretrain=UPSTREAM, paper=paper),
    'later': Row(pretrain=UPSTREAM),
  }
  published = {'p': {'pre-training': Number(65)}}
  study = Study(title='s', rows=rows, published=published)
  lines = dict(big='L', small='LM', p='L')
  places = dict(big=300, small=20, later=20, p=400)
  graph = study_results.graph_of(study, str(tmp_path))
  jobs = [*graph['big']['pre-training'], *graph['small']['pre-training']]
  events = [
    dict(event='start', step=0),
    dict(event='spans', step=1, seconds={'step': 14_400}),
    dict(event='spans', step=2, seconds={'step': 9_999}),  # a lost step
    dict(event='start', step=1),
    dict(event='spans', step=3, seconds={'step': 28_800}),
    dict(event='finished', step=3, metrics=[]),
  ]
  events = [{'time': '2030-01-01T00:00:00+00:00', **each} for each in events]
  for job, value, flops in zip(jobs, (0.7, 0.8, 0.5), (10, 10, 1), strict=True):
    finish(job, value)
    record = {'train_flops_per_image': flops * 1e15, 'num_devices': 4}
    folder = pathlib.Path(job.workdir)
    (folder / 'run.json').write_text(json.dumps(record))
    (folder / 'events.jsonl').write_text('\n'.join(map(json.dumps, events)))

  def drawn(x, *columns):
    figure = Figure(x, columns or ('pre-training',), lines, places)
    graph = study_results.graph_of(study, str(tmp_path))
    arrays = study_results.arrays(study, graph, {'figure': figure})
    assert study_results.draw(study, figure, arrays).axes
    return arrays

  std = 100 * np.std([0.7, 0.8], ddof=1)
  expected = [[20, 300], [50, 75], [0, std]]
  arrays = drawn('images')
  for key, points in {
    'L': expected,
    'M': [[20], [50], [0]],
    'M/paper': [[20], [60], [0]],
    'L/paper': [[20, 400], [60, 65], [0, 0]],
  }.items():
    np.testing.assert_allclose(arrays.pop(f'pre-training/{key}'), points)
  assert not arrays
  costs = drawn('exaflops')['pre-training/L'][0]
  np.testing.assert_allclose(costs, [3 * 2 * 1e-3, 3 * 2 * 1e-2])
  days = drawn('core_days')['pre-training/L'][0]
  np.testing.assert_allclose(days, [2, 2])
  speed = drawn('images_per_second')['pre-training/L']
  np.testing.assert_allclose(speed, expected)
  curve = drawn('epochs', 'test/accuracy')['test/accuracy/big']
  np.testing.assert_allclose(curve, [[3 * 2 / 8], [75], [std]])


def test_further_columns(tmp_path):
  """They are computed for each seed, when all runs are finished."""
  final = Stage(CONFIG, 'test/accuracy', seeds=(0, 1))
  task = Task(command='finetune', final=final)
  rows = {'r': Row(pretrain=None, transfers={'A': task})}
  study = Study(title='s', rows=rows)

  def half(runs):
    return [run['test/accuracy'] / 2 for run in runs['A']]

  extras = {
    'columns': {'half': (half, {'r': Number(90.72, 0.05)})},
    'figure': Figure('images', ('half',), places={'r': 9}),
  }

  def cell():
    graph = study_results.graph_of(study, str(tmp_path))
    text = study_results.table(study, graph, extras)
    [line] = [each for each in text.splitlines() if each.startswith('| r ')]
    return line.split('|')[2].strip()

  jobs = make_ready(study, tmp_path)
  for job, value in zip(jobs, (0.5, 0.7), strict=True):
    assert cell() == '– (90.72 ± 0.05)'
    finish(job, value)
  assert cell() == '30.00 ± 7.07 (90.72 ± 0.05)'
  graph = study_results.graph_of(study, str(tmp_path))
  points = study_results.arrays(study, graph, extras)
  np.testing.assert_allclose(points['half/r'][:2], [[9], [30]])
  np.testing.assert_allclose(points['half/r/paper'], [[9], [90.72], [0]])
  (pathlib.Path(jobs[0].workdir) / 'diverged.json').write_text('{}')
  assert cell().startswith('diverged (')


# Errors of AlexNet in %, typed in again in another order.
ALEXNET = dict(
  **dict(brightness=56.4592, contrast=85.3204, defocus_blur=81.9880),
  **dict(elastic_transform=64.6056, fog=81.9324, frost=82.6572),
  **dict(gaussian_noise=88.6428, glass_blur=82.6268, impulse_noise=92.2640),
  **dict(jpeg_compression=60.6500, motion_blur=78.5948, pixelate=71.7840),
  **dict(shot_noise=89.4468, snow=86.6816, zoom_blur=79.8360),
)


def test_mean_corruption_error(tmp_path, capsys):
  """AlexNet has 100 %."""
  path = 'configs/studies/robustness.py:columns=ImageNet-C'
  study = grid.load(path, grid.Study)
  assert len(study.rows['weights'].transfers) == 75 and len(ALEXNET) == 15

  def error(accuracy):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    for job in make_ready(study, folder):
      [dataset] = [f for f in job.flags if f.startswith('--dataset=')]
      name, _, severity = dataset.partition('/')[2].rpartition('_')
      finish(job, accuracy(name, int(severity)))
    study_results.main([path, str(folder)])
    lines = capsys.readouterr().out.splitlines()
    assert '| MAE H | – (33.8) |' in lines
    [line] = [each for each in lines if each.startswith('| weights')]
    return float(line.split('|')[2])

  # An error of 10, 20, 30, 40 and 50 % for each corruption has the mean 30 %.
  by_hand = sum(30 / error for error in ALEXNET.values()) / 15
  found = error(lambda name, severity: 1 - severity / 10)
  assert found == pytest.approx(100 * by_hand, abs=0.005)
  spread = {1: -0.02, 2: 0.02, 3: 0, 4: 0.01, 5: -0.01}
  assert error(lambda name, s: 1 - ALEXNET[name] / 100 + spread[s]) == 100


# (study, x axis, number of lines and of places of rows and published models)
SHIPPED = [
  ('cifar10.py', 'images', 3, 9),
  ('lengths.py', 'exaflops', 2, 0),
  ('finetuned.py:table=2', 'core_days', 5, 5),
  ('finetuned.py:table=5', 'images', 6, 17),
  ('finetuned.py:table=6', 'exaflops', 3, 18),
  ('fewshot.py:figure=4', 'images', 6, 24),
  ('fewshot.py:figure=4,data=i21k', 'images', 4, 16),
  ('fewshot.py:figure=8', 'exaflops', 5, 0),
  ('fewshot.py:figure=9', 'epochs', 3, 0),
  ('fewshot.py:figure=13', 'exaflops', 6, 3),
]


@pytest.mark.parametrize('name, x, lines, places', SHIPPED)
def test_figures_of_shipped_studies(name, x, lines, places):
  """Their lines, places and columns are those of the rows."""
  path = f'configs/studies/{name}'
  study, extras = grid.load(path, grid.Study), study_results.load_extras(path)
  figure, names = extras['figure'], [*study.rows, *study.published]
  assert figure.x == x
  assert {*figure.lines} | {*figure.places} <= {*names}
  drawn = {n for each in names for n in figure.lines.get(each, (each,))}
  assert len(drawn) == lines and len(figure.places) == places
  if x != 'epochs':
    columns = [c for row in study.rows.values() for c in row.columns]
    assert {*figure.columns} <= {*columns, *extras.get('columns', {})}
  for _, papers in extras.get('columns', {}).values():
    assert {*papers} <= {*names}


def test_real_labels_are_those_of_imagenets_models():
  """Their published numbers are typed in again."""
  for table, metric, row, number in (
    (2, 'real_ema/accuracy', 'H/14 jft', 90.72),
    (5, 'real/accuracy', 'L/32 i1k', 77.83),
    (6, 'real/accuracy', 'R50+L/16 14 epochs', 89.76),
  ):
    path = f'configs/studies/finetuned.py:table={table}'
    function, papers = study_results.load_extras(path)['columns']['ReaL']
    assert function({'ImageNet': [{metric: 0.5, 'x': 1}]}) == [0.5]
    assert papers[row].mean == number
    row = grid.load(path, grid.Study).rows[row]
    assert 'real=1' in row.transfers['ImageNet'].final.config
  path = 'configs/studies/finetuned.py:table=5,real=0'
  assert 'columns' not in study_results.load_extras(path)


def test_wrong_arguments_are_refused(tmp_path):
  with pytest.raises(UserError, match='WORKDIR'):
    study_results.main([CONFIG])
  with pytest.raises(UserError, match='get_extras'):
    path = 'configs/studies/self_supervised.py'
    study_results.main([path, str(tmp_path)])
