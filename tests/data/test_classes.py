"""Tests of class lists, and of labels with and without them."""

import pytest

from vit_jax.data.storage import class_folders
from vit_jax.errors import UserError

COCO = '1\tperson\n2\tbicycle\n44\tbottle\n'


def listed(folder, text):
  path = folder / 'classes.txt'
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  return class_folders.load(str(path))


def number(labels, known=None, whole=True):
  return class_folders.number(
    labels, lambda label: f'line of {label[:9]}', known, whole=whole
  )


@pytest.mark.parametrize(
  'text, labels',
  [
    (COCO, {'1': 0, '2': 1, '44': 2}),
    ('001\ta\n1\tb\n2\tc\n', {'1': 1, '001': 0}),
    ('cat\n7\ndog\n', {'7': 1, 'cat': 0}),
    ('cat\tthe cat\ndog\n', {'1': 1, '0': 0}),
    ('1 euro\n2 euro\n', {'2 euro': 1}),
    ('0 a\n1 b\n', {'1': 1}),
    (f'1\ta\n{10**20}\tb\n', {str(10**20): 1}),
    ('1.5\ta\n2\tb\n', {'1.5': 0}),
  ],
)
def test_labels_refer_to_keys_or_positions(tmp_path, text, labels):
  """A label is a key; if no key is a number, it may be a position."""
  known = listed(tmp_path, text)
  same, numbers = number(list(labels), known)
  assert same is known and numbers == labels


@pytest.mark.parametrize(
  'text, labels, whole, words',
  [
    (COCO, ['0'], True, "line of 0 has the class '0'.*allowed: 1, 2, 44"),
    (COCO, ['1', '3'], True, "'3'.*the 3 classes"),
    (COCO, ['1', 'person'], True, "'person'"),
    ('cat\ndog\n', ['2'], True, "label '2'.*0 to 1.*class_map.*tab"),
    ('cat\ndog\n', [str(10**20)], True, 'line of 100000000.*0 to 1'),
    # Without a list
    ('', ['0', '9' * 5000], True, '9999.*0 to 999,999.*a tab'),
    ('', ['0', '1000000'], False, "label '1000000'.*0 to 999,999"),
    ('', ['cat', '0'], True, 'line of cat.*line of 0.*class_map'),
    ('', ['cat'], False, "'cat'.*class_map"),
    ('', ['1.0', '2'], True, "label '1.0'.*integers"),
    ('', ['1e3'], True, "'1e3'.*integers"),
  ],
)
def test_wrong_labels_are_refused(tmp_path, text, labels, whole, words):
  """The message contains the location, the label, and what is allowed."""
  known = listed(tmp_path, text) if text else None
  with pytest.raises(UserError, match=words) as error:
    number(labels, known, whole=whole)
  assert len(str(error.value)) < 400


def test_labels_without_a_list():
  """Numbers up to the largest are classes; names are sorted."""
  known, numbers = number(['3', '0', '02'])
  assert known.keys == ['0', '1', '2', '3']
  assert numbers == {'3': 3, '0': 0, '02': 2}
  known, _ = number(['1', '2', '44'])  # numbers that do not occur are classes
  assert len(known.keys) == 45
  known, numbers = number({'dog', 'cat'})
  assert (known.names, numbers) == (['cat', 'dog'], {'cat': 0, 'dog': 1})
  known, numbers = number(['999'], whole=False)  # a split may lack classes
  assert len(known.keys) == 1000 and numbers == {'999': 999}


@pytest.mark.parametrize(
  'text',
  [
    b'\xef\xbb\xbfcat\tthe cat\r\ndog\r\n',
    'cat\tthe cat\r dog \r',
    '\ncat \t the cat\n\ndog',
  ],
)
def test_spelling_of_a_list_does_not_matter(tmp_path, text):
  """A BOM, line ends, blanks and blank lines are ignored."""
  known = listed(tmp_path, text)
  assert (known.keys, known.names) == (['cat', 'dog'], ['the cat', 'dog'])


@pytest.mark.parametrize(
  'text, word',
  [
    ('cat\ndog\ncat\n', 'cat more than once'),
    (' \n', 'no class'),
    (b'\xff\xfec\0a\0t\0', 'UTF-8'),
  ],
)
def test_files_that_are_not_lists_are_refused(tmp_path, text, word):
  """Otherwise their lines would become classes."""
  with pytest.raises(UserError, match=word):
    listed(tmp_path, text)
