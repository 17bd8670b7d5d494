"""Tests of Hugging Face datasets as written by the package `datasets`."""

import pickle

import contract
import pytest

pytest.importorskip('pyarrow')
hf = pytest.importorskip('datasets')  # an optional extra; see setup.py

import pyarrow as pa  # noqa: E402
import pyarrow.parquet  # noqa: E402

from vit_jax.data.images.headers import DecodeError  # noqa: E402
from vit_jax.data.sources import huggingface  # noqa: E402
from vit_jax.errors import UserError  # noqa: E402

NAMES = ['cat', 'cow', 'dog']


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
  cache = tmp_path_factory.mktemp('cache')
  monkeypatch.setattr(hf.config, 'HF_DATASETS_CACHE', cache)
  hf.disable_progress_bars()
  return cache


def images(start, stop):
  return [(contract.png(i), i % 3) for i in range(start, stop)]


def make(start, stop):
  """Returns a dataset of `datasets` with the examples of `images`."""
  features = {'image': hf.Image(), 'label': hf.ClassLabel(names=NAMES)}
  rows = [
    {'image': {'bytes': image, 'path': None}, 'label': label}
    for image, label in images(start, stop)
  ]
  return hf.Dataset.from_list(rows, features=hf.Features(features))


def open_split(path, split='train', **settings):
  return huggingface.Source(split, path=str(path), **settings)


def test_a_saved_dataset_is_the_split_train(tmp_path):
  """It may have several files."""
  make(0, 20).save_to_disk(tmp_path / 'saved', num_shards=3)
  source = open_split(tmp_path / 'saved')
  contract.check(source, images(0, 20), ['saved, split train, row 0'])
  assert source.class_names == NAMES
  contract.check_parts(lambda x: open_split(tmp_path / 'saved', x), '50%')


def test_a_saved_dataset_dict_has_its_splits(tmp_path):
  """A shuffled dataset has its new order."""
  shuffled = make(0, 9).shuffle(seed=1)
  whole = hf.DatasetDict(train=shuffled, validation=make(20, 24))
  whole.save_to_disk(tmp_path)
  plain = shuffled.cast_column('image', hf.Image(decode=False))
  expected = [(row['image']['bytes'], row['label']) for row in plain]
  assert expected != images(0, 9)
  both = open_split(tmp_path, 'val+train')
  places = ['split val'] * 4 + ['split train']
  contract.check(both, images(20, 24) + expected, places)
  with pytest.raises(UserError, match="no split 'test'.*train, validation"):
    open_split(tmp_path, 'test')


@pytest.mark.parametrize(
  'layout',
  [
    'data/train-0000{}-of-00002.parquet',
    'default/train/000{}.parquet',
    '000{}.parquet',
  ],
)
def test_layouts_of_the_hub_are_found(tmp_path, layout):
  """Files are named for their split, or are in a folder named for it."""
  for number in range(2):
    path = tmp_path / layout.format(number)
    path.parent.mkdir(parents=True, exist_ok=True)
    make(number * 4, number * 4 + 4).to_parquet(path)
  contract.check(open_split(tmp_path), images(0, 8), [])
  if 'train' in layout:
    other = tmp_path / layout.format(0).replace('train', 'validation')
    other.parent.mkdir(exist_ok=True)
    make(20, 23).to_parquet(str(other).replace('00002', '00001'))
    contract.check(open_split(tmp_path, 'val'), images(20, 23), [])
    contract.check(open_split(tmp_path), images(0, 8), [])


@pytest.mark.parametrize(
  'names, message',
  [
    ('de/train/0 en/train/0', '/de/train.*/en/train'),
    ('train-00001-of-00002', 'train has 1 Parquet files'),
    ('train-00000-of-00001 train-00001-of-00002', 'train has 2 Parquet files'),
    ('', 'save_to_disk'),
  ],
)
def test_ambiguous_layouts_are_refused(tmp_path, names, message):
  """Several configurations, a split in two places, or missing files."""
  for name in names.split():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    make(0, 2).to_parquet(tmp_path / f'{name}.parquet')
  with pytest.raises(UserError, match=message):
    open_split(tmp_path)


@pytest.mark.parametrize('cut', [0, 0.7, 'batch', 'end', 'missing'])
def test_truncated_arrow_files_are_refused(tmp_path, cut):
  """Also between two batches, where Arrow itself detects no damage."""
  make(0, 20).save_to_disk(tmp_path)
  [path] = tmp_path.glob('*.arrow')
  table = pa.ipc.open_stream(path.read_bytes()).read_all()
  with pa.ipc.new_stream(path, table.schema) as writer:
    writer.write_table(table, max_chunksize=10)
    between = path.stat().st_size
  whole = path.read_bytes()
  contract.check(open_split(tmp_path), images(0, 20), [])
  path.unlink()
  if cut != 'missing':
    ends = {'batch': between, 'end': len(whole) - 8}
    path.write_bytes(whole[: ends.get(cut) or int(len(whole) * cut)])
  with pytest.raises(UserError, match='source.path .*cannot be read'):
    open_split(tmp_path)


def test_damaged_parquet_files_are_refused(tmp_path):
  path = tmp_path / 'train.parquet'
  make(0, 20).to_parquet(path)
  whole = path.read_bytes()
  for damaged in (
    whole[: len(whole) // 2],
    whole[:4] + bytes(196) + whole[200:],  # a page
  ):
    path.write_bytes(damaged)
    with pytest.raises(UserError, match='source.path .*cannot be read'):
      open_split(tmp_path)


@pytest.mark.parametrize(
  'labels, message',
  [
    ([0, 10**11], 'label .100000000000.*ClassL'),
    ([None, -1], 'no row .* has a label'),  # labels of unlabelled splits
    ([0.5, 1.0], 'labels must be integers'),
  ],
)
def test_labels_that_are_not_classes_are_refused(tmp_path, labels, message):
  write_labels(tmp_path / 'data', train=pa.array(labels))
  with pytest.raises(UserError, match=message):
    open_split(tmp_path / 'data')


def test_splits_must_agree_on_the_classes(tmp_path):
  make(0, 3).to_parquet(tmp_path / 'train.parquet')
  other = hf.ClassLabel(names=NAMES[::-1])
  make(0, 3).cast_column('label', other).to_parquet(tmp_path / 'test.parquet')
  assert open_split(tmp_path).class_names == NAMES
  with pytest.raises(UserError, match='the splits have different classes'):
    open_split(tmp_path, 'train+test')


def test_columns_may_have_other_names_and_types(tmp_path):
  """Plain bytes as images, and plain numbers as labels."""
  columns = {
    'png': pa.array([contract.png(i) for i in range(4)]),
    'fine': pa.array([3, 0, None, 5], pa.int16()),
    'label': pa.array([0, 1, 0, 1]),
  }
  pa.parquet.write_table(pa.table(columns), tmp_path / 'train.parquet')
  source = open_split(tmp_path, image_key='png', label_key='fine')
  assert source.num_classes == 6
  assert source[0] == {'image': contract.png(0), 'label': 3}
  with pytest.raises(DecodeError, match='no label'):
    source[2]
  for keys, words in (
    (dict(label_key='fine'), "'image'.*'png', 'fine'"),
    (dict(image_key='fine', label_key='png'), "image_key='fine'"),
    (dict(label_key='fine', others=('label',)), "'label'.*'fine'"),
  ):
    with pytest.raises(UserError, match=words):
      open_split(tmp_path, **keys)


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
  with pytest.raises(DecodeError, match='no image'):
    source[1]
  assert source[2]['image'] == contract.png(1)
  path.unlink()
  with pytest.raises(DecodeError, match='No such file'):
    source[0]


@pytest.mark.parametrize('path', ['gs://bucket/data', 'https://host/x', 'a\0b'])
def test_messages_of_wrong_paths(path):
  words = 'needs a local path' if '//' in path else 'source.path'
  with pytest.raises(UserError, match=words):
    open_split(path)


def table_of(labels):
  """Returns an Arrow table with an image for each label."""
  images = pa.array([contract.png(i) for i in range(len(labels))])
  return pa.table({'image': images, 'label': labels})


def write_labels(folder, **columns):
  """Writes an Arrow array of labels for each split as a Parquet file."""
  folder.mkdir()
  for split, labels in columns.items():
    pa.parquet.write_table(table_of(labels), folder / f'{split}.parquet')


@pytest.mark.parametrize('kind', [pa.string(), pa.large_string()])
def test_text_is_numbered_in_sorted_order_of_all_splits(tmp_path, kind):
  """Each split has the same classes, also in a saved dataset."""
  train, test = ['dog', 'cat', None, 'dog', ' '], ['cow', 'dog']
  columns = {'train': pa.array(train, kind), 'test': pa.array(test, kind)}
  write_labels(tmp_path / 'data', **columns)
  columns['hidden'] = pa.array([-1, -1])  # of another type
  saved = {
    name: hf.Dataset(table_of(labels)) for name, labels in columns.items()
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
    assert other.labels().tolist() == [1, 2] and other.class_names == NAMES


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
