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
  keys = ('image', 'label', 'split')
  if kind == 'csv':
    path, lines = write_csv(tmp_path, ','.join(keys), ROWS), (2, 4, 5)
  else:
    rows = [dict(zip(keys, row, strict=True)) for row in ROWS]
    rows[2]['image'] = str(tmp_path / rows[2]['image'])  # an absolute path
    path, lines = write_jsonl(tmp_path, rows), (1, 5, 7)
  chosen = [row for row in ROWS if row[2] == 'train']
  expected = [(images[image], label == 'dog') for image, label, _ in chosen]
  source = manifest.Source('train', path=path)
  contract.check(source, expected, [f'line {line}' for line in lines])
  assert f'{tmp_path}/ä/4.png' in source.where(2)
  held_out = manifest.Source('validation', path=path)
  contract.check(held_out, [(images['b, c/2.png'], 0)], ['b, c/2.png'])
  assert source.class_names == held_out.class_names == ['cat', 'dog']


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


@pytest.mark.parametrize(
  'path', ['x\0.csv', 'list.csv/x.csv', 'loop.csv', 'absent.csv']
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


def test_files_that_do_not_exist_are_bad_records(tmp_path, images):
  """The other lines can be used."""
  names = ('a\0b.png', 'absent.png', *images)
  rows = [{'image': name, 'label': 0} for name in names]
  path = write_jsonl(tmp_path, rows)
  source = manifest.Source('train', path=path)
  for index, words in ((0, 'null'), (1, 'No such file')):
    with pytest.raises(DecodeError, match=words):
      source[index]
  assert source[2]['label'] == 0 and 'line 1)' in source.where(0)
  assert source.fingerprint['records'][0] is None
  with pytest.raises(UserError, match="no split 'test'"):
    manifest.Source('test', path=path)


CSV = {
  'image,class\n1.png,2\n': "'class'.*an image",
  'image,label\n': 'lists no image',
  'image,label\n1.png,0\n2.png\n': 'after line 2: too few',
  'image,label\na.jpg,cat,\n': 'too many fields.*quotes',
  'Image,Label\na,0\n': "'Image'.*lower case",
  'image,label\n"a,0\nb,1\n': 'unexpected end.*quotes',
  f'image,label\na,{"9" * 200_000}\n': 'field larger',
  'image,label\nhttps://h/a.jpg,0\n': 'line 2.*gs://',
  'image,label,split\na,0,train\nb,1,\n': 'line 3 lacks a field',
  'image,label\na,x\na,x\na,y\n': 'lines 2 and 4',
  f'image,label\na,0\nb,{10**11}\n': 'line 3.*0 to 999,999',
  'image,label\na, \n': "line 2.*'label': ''",
  'image,label\na,0\nb,cat\n': 'line 3.*line 2.*class_map',
  'image,label\n\udcff,0\n': 'UTF-8',
}
JSONL = {
  '{"image": "a"}\n{"image": "b", "label": 1}\n': 'line 2 lacks a field',
  '{"image": "a", "label": 0.5}': "'label': 0.5",
  '{"image": "a", "label": 0}\n[]': 'line 2 has {}',
  '{"image"': 'after line 0',
  '[' * 100_000: 'after line 0',
  '{"image": "a", "label": 0, "split": 0}': "'split': 0",
  '{"image": "a", "label": -1}': '-1.*integers',
}
LISTS = [('x.csv', *case) for case in CSV.items()]
LISTS += [('x.jsonl', *case) for case in JSONL.items()]


@pytest.mark.parametrize(
  'name, text, words', [*LISTS, ('x.txt', 'a 0', '.csv or .jsonl')]
)
def test_messages_of_wrong_lists(tmp_path, name, text, words):
  """The message names the line, and what is allowed."""
  path = tmp_path / name
  path.write_bytes(text.encode(errors='surrogateescape'))
  with pytest.raises(UserError, match=f'{name}.*{words}'):
    manifest.Source('train', path=str(path))


@pytest.mark.parametrize(
  'text',
  [
    b'\xef\xbb\xbfimage,label,split\r\na.png,cat,train\r\nb.png,dog,val\r\n',
    b' image , label,split \n a.png , cat ,train\n\n \nb.png,dog, val\n\n',
    b'id,split,"label",image\n7,train,"cat", "a.png"\n\n8,val,dog,b.png',
  ],
)
def test_spellings_of_csv_are_accepted(tmp_path, text):
  """A BOM, line ends, blanks, blank lines, and more columns in any order."""
  for number, name in enumerate(('a.png', 'b.png')):
    (tmp_path / name).write_bytes(contract.png(number))
  path = tmp_path / 'list.CSV'
  path.write_bytes(text)
  for number, split in enumerate(('train', 'val')):
    source = manifest.Source(split, path=str(path))
    contract.check(source, [(contract.png(number), number)], [])
    assert source.class_names == ['cat', 'dog']


def test_spellings_of_json_lines_are_accepted(tmp_path):
  """Separators within strings do not end a line; blanks are ignored."""
  (tmp_path / 'a.png').write_bytes(contract.png(1))
  rows = ['', '{"image": "a.png", "label": " x\u2028y\x85z ", "id": [1]}', ' ']
  path = tmp_path / 'list.jsonl'
  path.write_bytes('\r\n'.join(rows).encode('utf-8-sig'))
  source = manifest.Source('train', path=str(path))
  contract.check(source, [(contract.png(1), 0)], ['line 2'])
  assert source.class_names == ['x\u2028y\x85z']


def test_repeated_lines_are_separate_examples(tmp_path):
  """A repeated line has more weight; it may be in another split."""
  (tmp_path / 'a.png').write_bytes(contract.png(1))
  rows = [('a.png', 'dog', 'train')] * 2 + [('a.png', 'cat', 'val')]
  path = write_csv(tmp_path, 'image,label,split', rows)
  source = manifest.Source('train', path=path)
  contract.check(source, [(contract.png(1), 1)] * 2, ['line 2', 'line 3'])
  assert len(manifest.Source('val', path=path)) == 1
