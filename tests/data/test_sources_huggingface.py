"""Tests of Hugging Face datasets as written by the package `datasets`."""

import json
import pathlib
import pickle

import contract
import pytest

pytest.importorskip('pyarrow')
hf = pytest.importorskip('datasets')  # an optional extra; see setup.py

import pyarrow as pa  # noqa: E402
import pyarrow.parquet  # noqa: E402

from vit_jax.data.augment.transforms import DecodeError  # noqa: E402
from vit_jax.data.sources import huggingface  # noqa: E402
from vit_jax.data.storage import index  # noqa: E402
from vit_jax.errors import UserError  # noqa: E402

NAMES = ['cat', 'cow', 'dog']


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
  home = tmp_path_factory.mktemp('cache')
  monkeypatch.setenv('XDG_CACHE_HOME', str(home))
  hf.disable_progress_bars()
  return home


def images(start, stop):
  return [(contract.png(i), i % 3) for i in range(start, stop)]


def make(start, stop):
  """Returns a dataset of `datasets` with the examples of `images`."""
  features = {
    'image': hf.Image(),
    'label': hf.ClassLabel(names=NAMES),
    'caption': hf.Value('string'),
  }
  rows = [
    {'image': {'bytes': image, 'path': None}, 'label': label, 'caption': 'x'}
    for image, label in images(start, stop)
  ]
  return hf.Dataset.from_list(rows, features=hf.Features(features))


def open_split(path, split='train', **settings):
  return huggingface.Source(split, path=str(path), **settings)


def test_a_saved_dataset_is_the_split_train(tmp_path):
  """It may have several files."""
  make(0, 20).save_to_disk(tmp_path / 'saved', num_shards=3)
  source = open_split(tmp_path / 'saved')
  contract.check(source, images(0, 20), ['data-00000-of-00003.arrow, row 0'])
  assert source.class_names == NAMES
  assert source.where(19).endswith('data-00002-of-00003.arrow, row 5')
  rows, _ = contract.check_parts(
    lambda split: open_split(tmp_path / 'saved', split), '50%'
  )
  part = open_split(tmp_path / 'saved', 'train[:50%]')
  contract.check(part, [images(0, 20)[row] for row in rows], [])


def test_a_saved_dataset_dict_has_its_splits(tmp_path):
  """A shuffled dataset has its new order."""
  shuffled = make(0, 9).shuffle(seed=1)
  whole = hf.DatasetDict(train=shuffled, validation=make(20, 24))
  whole.save_to_disk(tmp_path)
  plain = shuffled.cast_column('image', hf.Image(decode=False))
  expected = [(row['image']['bytes'], row['label']) for row in plain]
  assert expected != images(0, 9)
  contract.check(open_split(tmp_path), expected, [])
  contract.check(open_split(tmp_path, 'val'), images(20, 24), [])
  both = open_split(tmp_path, 'validation+train')
  places = ['validation/'] * 4 + ['train/']
  contract.check(both, images(20, 24) + expected, places)
  with pytest.raises(UserError, match="no split 'test'.*train, validation"):
    open_split(tmp_path, 'test')


@pytest.mark.parametrize('folder', ['', 'data'])
def test_parquet_is_converted_once(tmp_path, folder, monkeypatch):
  """It is converted again when a file has changed."""
  (tmp_path / folder).mkdir(exist_ok=True)
  first = tmp_path / folder / 'train-00000-of-00002.parquet'
  make(0, 250).to_parquet(first, batch_size=70)
  make(250, 260).to_parquet(str(first).replace('00000-', '00001-'))
  make(500, 503).to_parquet(tmp_path / folder / 'test-00000-of-00001.parquet')
  source = open_split(tmp_path)
  contract.check(source, images(0, 260), [])
  assert source.class_names == NAMES
  contract.check(open_split(tmp_path, 'test'), images(500, 503), [])
  [*cached] = (tmp_path / folder / index.FOLDER).iterdir()
  assert len(cached) == 2
  with monkeypatch.context() as patch:
    patch.setattr(huggingface, '_convert', None)
    contract.check(open_split(tmp_path), images(0, 260), [])
  make(7, 9).to_parquet(first)
  expected = images(7, 9) + images(250, 260)
  contract.check(open_split(tmp_path), expected, [])


def write_parquet(path, labels, **names):
  """Writes rows with labels, and class names in the form of `datasets`."""
  image = [contract.png(i) for i in range(len(labels))]
  labels = pa.array(labels, pa.int64())
  table = pa.table({'image': pa.array(image, pa.binary()), 'label': labels})
  about = {'info': {'features': {'label': names}}}
  table = table.replace_schema_metadata({'huggingface': json.dumps(about)})
  pa.parquet.write_table(table, path)


def test_labels_that_are_not_classes_are_refused(tmp_path):
  """Large numbers and missing labels."""
  path = tmp_path / 'train.parquet'
  write_parquet(path, [0, 10**11])
  with pytest.raises(
    UserError, match='label 100000000000.*0 to 999,999.*ClassL'
  ):
    open_split(tmp_path)
  write_parquet(path, [None, -1])  # labels of unlabelled splits
  with pytest.raises(UserError, match='no label in any row'):
    open_split(tmp_path)
  write_parquet(path, [2, -1], names=None)
  assert open_split(tmp_path).num_classes == 3


def test_files_must_agree_on_the_classes(tmp_path):
  """Shards and splits are compared."""
  write_parquet(tmp_path / 'train-0.parquet', [0, 1], names=['cat', 'dog'])
  write_parquet(tmp_path / 'test-0.parquet', [0, 1], names=['dog', 'cat'])
  assert open_split(tmp_path).class_names == ['cat', 'dog']
  with pytest.raises(UserError, match='the splits of .* different lists'):
    open_split(tmp_path, 'train+test')
  (tmp_path / 'test-0.parquet').rename(tmp_path / 'train-1.parquet')
  with pytest.raises(UserError, match='train-1.parquet and .*train-0.parquet'):
    open_split(tmp_path)
  write_parquet(tmp_path / 'train-1.parquet', [0], names=['cat', 'dog'])
  assert len(open_split(tmp_path)) == 3


def test_converted_files_move_if_the_folder_cannot_be_written(
  tmp_path, cache_home
):
  """They go to the home directory; if that fails, it is an error."""
  make(0, 3).to_parquet(tmp_path / 'train.parquet')
  (tmp_path / index.FOLDER).write_text('in the way')
  contract.check(open_split(tmp_path), images(0, 3), [f'{cache_home}/vit_jax/'])
  (cache_home / 'vit_jax').rename(cache_home / 'moved')
  (cache_home / 'vit_jax').write_text('in the way')
  with pytest.raises(UserError, match='XDG_CACHE_HOME'):
    open_split(tmp_path)


def test_columns_may_have_other_names_and_types(tmp_path):
  """Plain bytes as images, and plain numbers as labels."""
  table = pa.table(
    {
      'png': pa.array([contract.png(i) for i in range(4)]),
      'fine': pa.array([3, 0, None, 5], pa.int16()),
    }
  )
  pa.parquet.write_table(table, tmp_path / 'train.parquet')
  source = open_split(tmp_path, image_key='png', label_key='fine')
  assert source.num_classes == 6
  assert source[0] == {'image': contract.png(0), 'label': 3}
  with pytest.raises(DecodeError, match='no label'):
    source[2]
  with pytest.raises(UserError, match="no column 'image'.*fine, png"):
    open_split(tmp_path, label_key='fine')
  with pytest.raises(
    UserError, match="'png' of type binary; they must.*cast_column"
  ):
    open_split(tmp_path, image_key='fine', label_key='png')


def test_rows_may_contain_paths(tmp_path):
  """A missing file is a bad record."""
  path = tmp_path / 'image.png'
  path.write_bytes(contract.png(1))
  paths = (str(path), None, '../image.png')  # relative to the data set
  rows = [{'image': {'bytes': None, 'path': p}, 'label': 1} for p in paths]
  saved = tmp_path / 'saved' / 'train.parquet'
  saved.parent.mkdir()
  pa.parquet.write_table(pa.Table.from_pylist(rows), saved)
  source = open_split(tmp_path / 'saved')
  assert source[0] == {'image': contract.png(1), 'label': 1}
  with pytest.raises(DecodeError, match='neither'):
    source[1]
  assert source[2]['image'] == contract.png(1)
  path.unlink()
  with pytest.raises(DecodeError, match='No such file'):
    source[0]


def test_messages_of_wrong_paths(tmp_path):
  """Each says what to do."""
  with pytest.raises(UserError, match='save_to_disk'):
    open_split(tmp_path)
  with pytest.raises(UserError, match='gcsfuse'):
    open_split('gs://bucket/data')
  for path in ('https://host/data', 'a\0b'):
    with pytest.raises(UserError, match='source.path is .* a local path'):
      open_split(path)
  make(0, 4).save_to_disk(tmp_path / 'saved')
  next(pathlib.Path(tmp_path / 'saved').glob('*.arrow')).unlink()
  with pytest.raises(UserError, match='arrow is missing'):
    open_split(tmp_path / 'saved')


def write_labels(folder, **columns):
  """Writes an Arrow array of labels for each split as a Parquet file."""
  folder.mkdir()
  for split, labels in columns.items():
    images = pa.array([contract.png(i) for i in range(len(labels))])
    table = pa.table({'image': images, 'label': labels})
    pa.parquet.write_table(table, folder / f'{split}.parquet')


KINDS = [f'{sign}int{bits}' for sign in ('', 'u') for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize('kind', KINDS)
def test_integers_of_any_width_are_labels(tmp_path, kind):
  labels = pa.array([100, None, 0, 3], getattr(pa, kind)())
  write_labels(tmp_path / 'data', train=labels)
  source = open_split(tmp_path / 'data')
  assert source.num_classes == 101
  assert source.labels().tolist() == [100, -1, 0, 3]
  assert [type(source[i]['label']) for i in (0, 2, 3)] == [int] * 3


@pytest.mark.parametrize('kind', [pa.string(), pa.large_string()])
def test_text_is_numbered_in_sorted_order_of_all_splits(tmp_path, kind):
  """Each split has the same classes, also in a saved dataset."""
  train = ['dog', 'cat', None, 'dog', ' ']
  test = ['cow', 'dog']
  columns = {'train': pa.array(train, kind), 'test': pa.array(test, kind)}
  write_labels(tmp_path / 'data', **columns)
  saved = {
    name: hf.Dataset(pa.table({'image': images, 'label': labels}))
    for name, labels in columns.items()
    for images in [pa.array([contract.png(i) for i in range(len(labels))])]
  }
  hf.DatasetDict(saved).save_to_disk(tmp_path / 'saved')
  for name in ('data', 'saved'):
    source = pickle.loads(pickle.dumps(open_split(tmp_path / name)))
    assert source.class_names == NAMES and source.num_classes == 3
    assert source.labels().tolist() == [2, 0, -1, 2, -1]
    assert [source[i]['label'] for i in (0, 1, 3)] == [2, 0, 2]
    for bad in (2, 4):
      with pytest.raises(DecodeError, match='no label'):
        source[bad]
    other = open_split(tmp_path / name, 'test')
    assert other.labels().tolist() == [1, 2]
    assert other.class_names == NAMES


def test_text_of_numbers_and_booleans(tmp_path):
  """Numbers keep their value, and False is the class 0."""
  write_labels(tmp_path / 'text', train=pa.array(['10', '2', '0']))
  source = open_split(tmp_path / 'text')
  assert source.num_classes == 11 and source.labels().tolist() == [10, 2, 0]
  write_labels(tmp_path / 'bool', train=pa.array([True, None, False, True]))
  source = open_split(tmp_path / 'bool')
  assert source.class_names == ['False', 'True']
  assert source.labels().tolist() == [1, -1, 0, 1]
  assert source[0]['label'] == 1 and type(source[0]['label']) is int


def test_labels_of_other_kinds_are_refused(tmp_path):
  """The message contains the type and a remedy."""
  write_labels(tmp_path / 'float', train=pa.array([0.5, 1.0]))
  with pytest.raises(UserError, match='type double; they must.*cast_column'):
    open_split(tmp_path / 'float')
  kinds = dict(train=pa.array(['a']), test=pa.array([1]))
  write_labels(tmp_path / 'both', **kinds)
  assert open_split(tmp_path / 'both').class_names == ['a']
  with pytest.raises(UserError, match="different .*types of 'label'"):
    open_split(tmp_path / 'both', 'train+test')
