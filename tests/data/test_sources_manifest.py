"""Tests of manifests in CSV and JSON lines."""

import json

import contract
import pytest

from vit_jax.data.images.headers import DecodeError
from vit_jax.data.sources import manifest
from vit_jax.errors import UserError

ROWS = [
  ('a/1.png', 'dog', 'train'),
  ('b, c/2.png', 'cat', 'val'),
  ('a/3.png', 'cat', 'train'),
  ('ä/4.png', 'dog', 'train'),
]


@pytest.fixture
def images(tmp_path):
  """Writes the images of ROWS next to the manifest: {path: bytes}."""
  content = {}
  for number, (path, _, _) in enumerate(ROWS):
    content[path] = contract.png(number)
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_bytes(content[path])
  return content


def write_csv(folder, header, rows):
  path = folder / 'list.csv'
  quoted = [','.join(f'"{cell}"' for cell in row) for row in rows]
  path.write_text('\n'.join([header, *quoted]) + '\n')
  return str(path)


def write_jsonl(folder, rows):
  path = folder / 'list.jsonl'
  path.write_text('\n\n'.join(json.dumps(row) for row in rows))
  return str(path)


@pytest.mark.parametrize('kind', ['csv', 'jsonl'])
def test_names_are_sorted_classes(tmp_path, images, kind):
  """The names of the whole list are the classes of each split."""
  if kind == 'csv':
    path = write_csv(tmp_path, 'image,label,split', ROWS)
    lines = ['line 2', 'line 4', 'line 5']
  else:
    keys = ('image', 'label', 'split')
    rows = [dict(zip(keys, row, strict=True)) for row in ROWS]
    path = write_jsonl(tmp_path, rows)
    lines = ['line 1', 'line 5', 'line 7']
  chosen = [row for row in ROWS if row[2] == 'train']
  expected = [(images[image], label == 'dog') for image, label, _ in chosen]
  source = manifest.Source('train', path=path)
  contract.check(source, expected, lines)
  assert f'{tmp_path}/ä/4.png' in source.where(2)
  assert source.class_names == ['cat', 'dog']
  held_out = manifest.Source('validation', path=path)
  assert held_out.class_names == ['cat', 'dog']
  contract.check(held_out, [(images['b, c/2.png'], 0)], ['b, c/2.png'])


def test_numbers_are_labels(tmp_path, images):
  """Absolute paths are not changed."""
  rows = [(str(tmp_path / image), i * 2) for i, image in enumerate(images)]
  path = write_csv(tmp_path, 'image,label', rows)
  source = manifest.Source('train', path=path)
  expected = list(zip(images.values(), [0, 2, 4, 6], strict=True))
  contract.check(source, expected, [])
  assert source.num_classes == 7
  lines = [dict(label=i, image=p) for i, p in enumerate(images)]
  source = manifest.Source('train', path=write_jsonl(tmp_path, lines))
  assert [source[i]['label'] for i in range(4)] == [0, 1, 2, 3]


def test_parts_of_a_sorted_list_contain_all_classes(tmp_path):
  """The order of the lines does not matter."""
  rows = [(f'{i}.png', 'ab'[i // 50]) for i in range(100)]

  def held_out(rows):
    path = write_csv(tmp_path, 'image,label', rows)
    parts = contract.check_parts(
      lambda split: manifest.Source(split, path=path), '90%'
    )
    assert all({rows[i][1] for i in part} == {'a', 'b'} for part in parts)
    return {rows[i] for i in parts[1]}

  assert len(held_out(rows)) == 10
  assert held_out(rows) == held_out(rows[::-1])


def test_class_map_makes_sparse_numbers_dense(tmp_path, images):
  listed = tmp_path / 'classes.txt'
  listed.write_text('1\tperson\n2\tbicycle\n44\tbottle\n')
  [*paths] = images
  rows = list(zip(paths, ('44', '1', '2', '1'), strict=True))
  path = write_csv(tmp_path, 'image,label', rows)
  source = manifest.Source('train', path=path, class_map=str(listed))
  assert [source[i]['label'] for i in range(4)] == [2, 0, 1, 0]
  assert source.class_names == ['person', 'bicycle', 'bottle']
  assert source.num_classes == 3
  path = write_jsonl(tmp_path, [{'image': p, 'label': 3} for p in paths])
  with pytest.raises(UserError, match="line 1, has the class '3', which is"):
    manifest.Source('train', path=path, class_map=str(listed))


@pytest.mark.parametrize(
  'path', ['https://host/list.csv', 'x\0.csv', 'list.csv/x.csv', 'loop.csv']
)
def test_messages_of_wrong_paths(tmp_path, monkeypatch, path):
  """The message names the key."""
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'list.csv').write_text('image,label\na,0\n')
  (tmp_path / 'loop.csv').symlink_to('loop.csv')
  with pytest.raises(UserError, match='config.source.path'):
    manifest.Source('train', path=path)
  with pytest.raises(UserError, match='config.source.class_map'):
    manifest.Source('train', path='list.csv', class_map=path)


def test_missing_files(tmp_path):
  """A missing manifest is a user error, a missing image is a bad record."""
  with pytest.raises(UserError, match='config.source.path'):
    manifest.Source('train', path=str(tmp_path / 'absent.csv'))
  path = write_csv(tmp_path, 'image,label', [('absent.png', 0)])
  with pytest.raises(DecodeError, match='No such file'):
    manifest.Source('train', path=path)[0]
  with pytest.raises(UserError, match="no split 'test'"):
    manifest.Source('test', path=path)
