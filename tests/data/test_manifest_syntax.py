"""Tests of the syntax of manifests."""

import contract
import pytest
from test_sources_manifest import write_csv

from vit_jax.data.sources import manifest
from vit_jax.errors import UserError

CSV = {
  'image,class\n1.png,2\n': "'class'.*an image",
  'image,label\n': 'lists no image',
  'image,label\n1.png,0\n2.png\n': 'after line 2: too few',
  'image,label\na.jpg,cat,\n': 'too many fields.*quotes',
  'image;label\na;0\n': 'image;label.*commas',
  'Image,Label\na,0\n': "'Image'.*lower case",
  'image,label\n"a,0\nb,1\n': 'unexpected end.*quotes',
  f'image,label\na,{"9" * 200_000}\n': 'field larger',
  'image,label\nhttps://h/a.jpg,0\n': 'line 2.*gs://',
  'image,label,split\na,0,train\nb,1,\n': 'line 3 lacks a field',
  'image,label\na,x\na,x\na,y\n': 'lines 2 and 4',
  f'image,label\na,0\nb,{10**11}\n': 'line 3.*0 to 999,999',
  'image,label\na,1.0\n': 'line 2.*integers',
  'image,label\na, \n': "line 2.*'label': ''",
  'image,label\na,0\nb,cat\n': 'line 3.*line 2.*class_map',
  'image,label\n\udcff,0\n': 'UTF-8',
}
JSONL = {
  '{"image": "a"}\n{"image": "b", "label": 1}\n': 'line 2 lacks a field',
  '{"image": "a", "width": 3}': "line 1.*'width': 3",
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
