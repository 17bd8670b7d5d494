"""Tests of files of Hugging Face datasets: layouts and damage."""

import contract
import pytest

pa = pytest.importorskip('pyarrow')
pytest.importorskip('datasets')  # an optional extra; see setup.py

from test_sources_huggingface import images, make, open_split  # noqa: E402

from vit_jax.data.storage import index  # noqa: E402
from vit_jax.errors import UserError  # noqa: E402


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))


@pytest.mark.parametrize(
  'names',
  [
    ['data/train-00000-of-00002.parquet', 'data/train-00001-of-00002.parquet'],
    ['default/train/0000.parquet', 'default/train/0001.parquet'],
    ['train/0000.parquet', 'train/0001.parquet'],
    ['data/train/a.parquet', 'data/train/b.parquet'],
    ['0000.parquet', '0001.parquet'],
    ['data/0000.parquet', 'data/0001.parquet'],
    [f'plain_text/train-0000{i}-of-00002.parquet' for i in range(2)],
  ],
)
def test_layouts_of_the_hub_are_found(tmp_path, names):
  """Files are named for their split, or are in a folder named for it."""
  for number, name in enumerate(names):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    make(number * 4, number * 4 + 4).to_parquet(tmp_path / name)
  contract.check(open_split(tmp_path), images(0, 8), [])
  contract.check(open_split(tmp_path, 'all'), images(0, 8), [])
  if 'train' in names[0]:
    other = tmp_path / names[0].replace('train', 'validation')
    other.parent.mkdir(exist_ok=True)
    make(20, 23).to_parquet(str(other).replace('00002', '00001'))
    contract.check(open_split(tmp_path, 'val'), images(20, 23), [])
    contract.check(open_split(tmp_path), images(0, 8), [])
  if not names[0].endswith('a.parquet'):  # the only name without a split
    contract.check(open_split((tmp_path / names[0]).parent), images(0, 8), [])


def test_ambiguous_layouts_are_refused(tmp_path):
  """Several configurations, a split in two places, or missing files."""
  for config in ('de', 'en'):
    (tmp_path / config / 'train').mkdir(parents=True)
    make(0, 2).to_parquet(tmp_path / config / 'train' / '0000.parquet')
  with pytest.raises(
    UserError, match='folders .*/de/train and .*/en/train: .*source.path'
  ):
    open_split(tmp_path)
  contract.check(open_split(tmp_path / 'en'), images(0, 2), [])
  make(0, 2).to_parquet(tmp_path / 'en' / 'train.parquet')
  with pytest.raises(UserError, match='folders .*/en and .*/en/train'):
    open_split(tmp_path / 'en')
  parts = tmp_path / 'parts'
  parts.mkdir()
  make(0, 2).to_parquet(parts / 'train-00001-of-00002.parquet')
  with pytest.raises(UserError, match='1 Parquet files .* specify 2'):
    open_split(parts)
  make(0, 2).to_parquet(parts / 'train-00000-of-00001.parquet')
  with pytest.raises(UserError, match='2 Parquet files .* specify 2'):
    open_split(parts)


@pytest.mark.parametrize('share', [0, 0.3, 0.7, 'batch', 'end'])
def test_truncated_arrow_files_are_refused(tmp_path, share):
  """Also between two batches, where Arrow itself detects no damage."""
  make(0, 20).save_to_disk(tmp_path)
  [path] = tmp_path.glob('*.arrow')
  table = pa.ipc.open_stream(path.read_bytes()).read_all()
  with pa.ipc.new_stream(path, table.schema) as writer:
    writer.write_table(table, max_chunksize=10)
    between = path.stat().st_size
  whole = path.read_bytes()
  contract.check(open_split(tmp_path), images(0, 20), [])
  ends = {'batch': between, 'end': len(whole) - 8}
  end = ends[share] if share in ends else int(len(whole) * share)
  path.write_bytes(whole[:end])
  with pytest.raises(UserError, match='arrow cannot be read'):
    open_split(tmp_path)


@pytest.mark.parametrize('share', [0, 0.5, 0.99])
def test_truncated_parquet_files_are_refused(tmp_path, share):
  """The message names the file; converted files are not kept."""
  paths = [tmp_path / f'train-0000{i}-of-00002.parquet' for i in range(2)]
  for path in paths:
    make(0, 20).to_parquet(path)
  whole = paths[1].read_bytes()
  paths[1].write_bytes(whole[: int(len(whole) * share)])
  with pytest.raises(UserError, match='00001-of-00002.parquet cannot be read'):
    open_split(tmp_path)
  page = bytearray(whole)
  page[4:200] = bytes(196)
  paths[1].write_bytes(page)
  with pytest.raises(UserError, match='00001-of-00002.parquet cannot be read'):
    open_split(tmp_path)
  assert not list(tmp_path.glob(f'{index.FOLDER}/*'))


def test_a_truncated_converted_file_is_written_again(tmp_path):
  make(0, 20).to_parquet(tmp_path / 'train.parquet')
  open_split(tmp_path)
  [cached] = tmp_path.glob(f'{index.FOLDER}/*')
  cached.write_bytes(cached.read_bytes()[:-8])
  contract.check(open_split(tmp_path), images(0, 20), [])


@pytest.mark.parametrize(
  'name, text',
  [
    ('dataset_dict.json', '{"spl'),
    ('dataset_dict.json', '[]'),
    ('state.json', '{"_data_files": [{}]}'),
    ('state.json', '{}'),
  ],
)
def test_damaged_descriptions_are_refused(tmp_path, name, text):
  """The message names the file."""
  (tmp_path / name).write_text(text)
  with pytest.raises(UserError, match=f'{name} cannot be read'):
    open_split(tmp_path)
