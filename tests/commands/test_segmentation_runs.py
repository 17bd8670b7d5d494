"""Tests of runs of `configs/segment.py` with the real commands."""

import json

import cv2
import jax
import jax.export
import numpy as np
import PIL.Image
import pytest

from tests import cli, shapes_folder, sliding_windows

SMALL = cli.SMALL_FILES | {
  'log.report': 'false',
  'evals.val.preprocess.label_size': 64,
}


def command_of(data, workdir, **more):
  values = SMALL | {k.replace('__', '.'): v for k, v in more.items()}
  config = f'configs/segment.py:path={data},data=folder,classes=3,size=32'
  return cli.command('train', *cli.flags(config, workdir, values))


@pytest.fixture(scope='module')
def data(tmp_path_factory):
  folder = tmp_path_factory.mktemp('shapes')
  shapes_folder.write(folder)
  return folder


@pytest.fixture(scope='module')
def trained(data, tmp_path_factory):
  workdir = tmp_path_factory.mktemp('segment') / 'run'
  cli.run(command_of(data, workdir))
  return workdir


@pytest.mark.long
def test_a_killed_run_equals_an_uninterrupted_one(data, trained, tmp_path):
  """Also the running statistics, on which the mean IoU depends."""
  workdir = tmp_path / 'run'
  cli.kill_when(
    command_of(data, workdir, total='6 steps'),
    lambda: (workdir / 'checkpoints' / '3').exists(),
    'a run of segment',
    240,
  )
  cli.run(command_of(data, workdir))
  assert cli.lines(workdir) == cli.lines(trained)
  cli.assert_same_params(workdir, trained)
  last = cli.lines(trained)[-1]
  assert last['val/pixels'] == 8 * 64 * 64 and last['val/classes'] == 3
  out, _ = cli.run(cli.command('evaluate', f'--checkpoint={workdir}', '--json'))
  assert json.loads(out)['miou'] == last['val/miou']


@pytest.mark.long
def test_two_processes_measure_like_one(trained):
  """The same sums over 8 images."""
  one, two = cli.evaluated_by_one_and_two(trained)
  for name in ('miou', 'accuracy', 'mean_accuracy', 'classes', 'pixels'):
    # A few pixels have equal scores up to rounding.
    assert two[name] == pytest.approx(one[name], rel=1e-3), name


@pytest.mark.slow
def test_predict_export_and_analyze(data, trained, tmp_path):
  """Masks have the sizes of the photographs, and equal a loop over windows."""
  photos, program = tmp_path / 'photos', tmp_path / 'program'
  rng = np.random.default_rng(0)
  shapes = {'a.png': (50, 81), 'b/a.png': (64, 64), 'c.png': (97, 30)}
  for name, shape in shapes.items():
    (photos / name).parent.mkdir(parents=True, exist_ok=True)
    blocks = rng.integers(0, 256, (shape[0] // 8 + 1, shape[1] // 8 + 1, 3))
    pixels = np.kron(blocks, np.ones((8, 8, 1)))[: shape[0], : shape[1]]
    PIL.Image.fromarray(pixels.astype(np.uint8)).save(photos / name)
  (photos / 'broken.jpg').write_bytes(b'not an image')
  given = f'--checkpoint={trained}'
  cli.run(cli.command('export', given, f'--out={program}'))
  data_of = (program / 'model.stablehlo').read_bytes()
  weights = jax.export.deserialize(bytearray(data_of)).call
  about = json.loads((program / 'description.json').read_text())
  assert about['preprocess']['name'] == 'segments'
  assert weights(np.zeros((2, 32, 32, 3), np.uint8)).shape == (2, 4, 4, 3)
  command = cli.command('predict', given, str(photos), f'--out={tmp_path}/out')
  out, err = cli.run([*command, '--json'], code=2)
  assert '1 of 4 images' in err and 'broken.jpg' in err
  lines = map(json.loads, out.splitlines())
  assert {line['image']: line['mask'] for line in lines} == {
    str(photos / name): f'{tmp_path}/out/{name}' for name in shapes
  }
  used = set()
  for name, shape in shapes.items():
    pixels = np.array(PIL.Image.open(photos / name))
    mask = PIL.Image.open(f'{tmp_path}/out/{name}')
    colours = np.reshape(mask.getpalette(), (-1, 3))  # those of Pascal VOC
    assert colours[:3].tolist() == [[0, 0, 0], [128, 0, 0], [0, 128, 0]]
    classes = np.array(mask)
    assert classes.shape == shape
    expected = sliding_windows.predicted_classes(weights, pixels)
    assert (classes == expected).mean() > 0.999
    used |= {*np.unique(classes).tolist()}
  assert len(used) > 1
  _, err = cli.run(cli.command('predict', given, str(photos)), code=2)
  assert '--out=DIR' in err
  cli.run(cli.command('analyze', given, '--num_images=3'))
  arrays = np.load(trained / 'figures' / 'figures.npz')
  assert arrays['segments'].shape == arrays['classes'].shape == (3, 32, 32)
  assert set(np.unique(arrays['classes'])) <= {0, 1, 2}
  mask = cv2.imread(f'{data}/annotations/val/0.png', cv2.IMREAD_UNCHANGED)
  small = mask[1::2, 1::2]
  assert (arrays['segments'][0] == small).mean() > 0.95
  assert (trained / 'figures' / 'segments.png').stat().st_size > 1000
