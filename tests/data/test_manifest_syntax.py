"""Tests of the syntax of manifests."""

import contract
import pytest
from test_sources_manifest import write_csv

from vit_jax.data.sources import manifest
from vit_jax.errors import UserError


@pytest.mark.parametrize(
  'name, content, words',
  [
    ('x.csv', 'image,class\n1.png,2\n', ["'class'", 'an image']),
    ('x.csv', 'image,label\n', ['lists no image']),
    ('x.csv', 'image,label\n1.png,0\n2.png\n', ['after line 2', 'too few']),
    ('x.csv', 'image,label\na.jpg,cat,\n', ['too many', 'quotes']),
    ('x.csv', 'image;label\na;0\n', ['image;label', 'commas']),
    ('x.csv', 'Image,Label\na,0\n', ["'Image'", 'lower case']),
    ('x.csv', 'image,label\n"a,0\nb,1\n', ['unexpected end', 'quotes']),
    ('x.csv', f'image,label\na,{"9" * 200_000}\n', ['field larger']),
    ('x.csv', 'image,label\nhttps://h/a.jpg,0\n', ['line 2', 'gs://']),
    (
      'x.csv',
      'image,label,split\na,0,train\nb,1,\n',
      ['line 3', 'lacks a field'],
    ),
    (
      'x.csv',
      'image,label\na,x\na,x\na,y\n',
      ['lines 2 and 4', 'a label'],
    ),
    ('x.csv', f'image,label\na,0\nb,{10**11}\n', ['line 3', '0 to 999,999']),
    ('x.csv', 'image,label\na,1.0\n', ['line 2', 'integers']),
    ('x.csv', 'image,label\na, \n', ['line 2', "'label': ''"]),
    ('x.csv', 'image,label\na,0\nb,cat\n', ['line 2', 'line 3', 'class_map']),
    ('x.csv', b'image,label\n\xff,0\n', ['UTF-8']),
    ('x.jsonl', '{"image": "a", "width": 3}', ['line 1', "'width': 3"]),
    ('x.jsonl', '{"image": "a", "label": 0.5}', ["'label': 0.5"]),
    ('x.jsonl', '{"image": "a", "label": 0}\n[]', ['line 2', '{}']),
    ('x.jsonl', '{"image"', ['after line 0']),
    ('x.jsonl', '[' * 100_000, ['after line 0']),
    ('x.jsonl', '{"image": "a", "label": 0, "split": 0}', ["'split': 0"]),
    ('x.jsonl', '{"image": "a", "label": -1}', ['-1', 'integers']),
    ('x.txt', 'a 0', ['.csv or .jsonl']),
  ],
)
def test_messages_of_wrong_lists(tmp_path, name, content, words):
  """The message names the line, and what is allowed."""
  path = tmp_path / name
  path.write_bytes(content if isinstance(content, bytes) else content.encode())
  with pytest.raises(UserError) as error:
    manifest.Source('train', path=str(path))
  for word in [name, *words]:
    assert word in str(error.value)


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
