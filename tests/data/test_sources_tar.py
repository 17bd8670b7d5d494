"""Tests of tar shards: listing, examples and index."""

import io
import json
import os
import tarfile

import contract
import pytest

from vit_jax.data.sources import tar
from vit_jax.errors import UserError


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))


def write_tar(path, members, tar_format=tarfile.PAX_FORMAT):
  """Writes (name, content) pairs.

  A name that ends in / is a folder; a link is (name, target, type).
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  with tarfile.open(path, 'w', format=tar_format) as file:
    for name, content in members:
      target, kind = '', tarfile.REGTYPE
      if isinstance(name, tuple):
        name, target, kind = name
      info = tarfile.TarInfo(name.rstrip('/'))
      info.type = tarfile.DIRTYPE if name.endswith('/') else kind
      info.linkname = target
      info.size = len(content)
      file.addfile(info, io.BytesIO(content))


def samples(start, stop):
  """Yields members of examples: image i with label i % 5."""
  for i in range(start, stop):
    yield f'{i:06d}.png', contract.png(i)
    yield f'{i:06d}.cls', b'%d\n' % (i % 5)


def images(start, stop):
  return [(contract.png(i), i % 5) for i in range(start, stop)]


@pytest.fixture
def shards(tmp_path):
  """Writes train-{000..002}.tar with 4, 5 and 3 examples, val-0.tar with 2."""
  for number, (start, stop) in enumerate([(0, 4), (4, 9), (9, 12)]):
    write_tar(tmp_path / f'a-train-{number:03d}.tar', samples(start, stop))
  write_tar(tmp_path / 'a-val-0.tar', samples(50, 52))
  return tmp_path


def test_a_directory_of_shards(shards):
  """Shards of a split are read in the order of their names."""
  both = tar.Source('validation+train', path=str(shards))
  places = ['val'] * 2 + ['a-train-000.tar'] * 4 + ['a-train-001.tar'] * 5
  contract.check(both, images(50, 52) + images(0, 12), places)
  contract.check_parts(lambda s: tar.Source(s, path=str(shards)), '50%')
  path, _, offset = both.where(2 + 7).partition(' @ ')
  with open(path, 'rb') as file:
    file.seek(int(offset))
    assert file.read(len(contract.png(7))) == contract.png(7)


PATTERNS = {
  'a-train-{000..002}.tar': images(0, 12),
  'a-{train-001,train-000}.tar': images(4, 9) + images(0, 4),
  'a-train-00{2..2}.tar': images(9, 12),
  'a-train-002.tar': images(9, 12),
  'a-train-*.tar': images(0, 12),
  '?-train-00{1,2}.t*': images(4, 12),
}


@pytest.mark.parametrize('pattern', PATTERNS)
def test_brace_patterns(shards, pattern):
  """Ranges and lists in braces are read in their order."""
  source = tar.Source('train', path=f'{shards}/{pattern}')
  contract.check(source, PATTERNS[pattern], [])


def test_the_first_folder_may_have_a_wildcard(shards):
  _, first, *rest = str(shards).split('/')
  path = '/'.join(['', f'?{first[1:]}', *rest, 'a-train-*.tar'])
  contract.check(tar.Source('train', path=path), images(0, 12), [])


@pytest.mark.parametrize(
  'path, words',
  [
    ('https://host/x.tar', 'https://host/x.tar.* gs://'),
    ('a-val-0.tar/x.tar', 'Not a directory'),
    ('x' * 300 + '.tar', 'File name too long'),
    ('empty', 'no .tar file'),
    ('loop.tar', 'symbolic links.*loop.tar'),
    ('folder.tar', 'directory.*folder.tar'),
    ('a-train-00[?]*.tar', 'no .tar file'),  # [ is an ordinary character
    ('a-{train,val}-{000,0}.tar', 'No such file'),
    ('a-train-{3..1}.tar', 'no .tar file.*the smaller number first'),
  ],
)
def test_messages_of_wrong_paths(shards, monkeypatch, path, words):
  """The message contains the path."""
  monkeypatch.chdir(shards)
  for folder in ('folder.tar', 'empty'):
    (shards / folder).mkdir()
  (shards / 'loop.tar').symlink_to('loop.tar')
  with pytest.raises(UserError, match=words):
    tar.Source('train', path=path)


def test_splits_by_folders_of_shards(tmp_path):
  """train/ and val/; without such names, all shards are train."""
  write_tar(tmp_path / 'train' / '0.tar', samples(0, 3))
  write_tar(tmp_path / 'val' / '0.tar', samples(3, 5))
  contract.check(tar.Source('val', path=str(tmp_path)), images(3, 5), [])
  plain = tmp_path / 'trained'  # not the word 'train'
  write_tar(plain / 'constrain-1.tar', samples(5, 7))
  contract.check(tar.Source('train', path=str(plain)), images(5, 7), [])
  write_tar(plain / 'test-1.tar', samples(5, 7))
  with pytest.raises(UserError, match='constrain-1.tar has no split'):
    tar.Source('test', path=str(plain))


@pytest.mark.parametrize(
  'tar_format', [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
)
def test_names_of_members_are_grouped_into_examples(tmp_path, tar_format):
  """Folders, long names, several dots, upper case, ignored members."""
  long = 'f/' * 40 + 'x' * 90
  members = [
    ('./', b''),
    ('a/', b''),
    ('a/1.b.txt', b'no image'),
    ('a/1.JPG', contract.png(1)),
    ('a/1.cls', b'3'),
    ('b/1.cls', b'4'),  # another folder, another example
    ('b/._1.jpg', b'hidden'),
    ('b/1.jpeg', contract.png(2)),
    ('b/1.seg.png', contract.png(0)),
    (f'{long}.png', contract.png(3)),
    (f'{long}.cls', b'0'),
  ]
  write_tar(tmp_path / 'x.tar', members, tar_format)
  expected = [(contract.png(1), 3), (contract.png(2), 4), (contract.png(3), 0)]
  contract.check(tar.Source('train', path=str(tmp_path)), expected, [])


def test_labels_in_json_members(tmp_path):
  """The key can be chosen; each key has its own index."""
  members = []
  for i in range(3):
    label = {'label': i, 'fine': 10 + i, 'name': f'c{i}', 'la-bel': 3 + i}
    members.append((f'{i}.json', json.dumps(label).encode()))
    members.append((f'{i}.jpg', contract.png(i)))
  write_tar(tmp_path / 'x.tar', members)
  (tmp_path / 'names.txt').write_text('c2\nc1\nc0\n')
  (tmp_path / 'numbers.txt').write_text('10\ta\n11\tb\n44\tc\n12\td\n')

  def labels(key, listed=None):
    listed = listed and str(tmp_path / listed)
    source = tar.Source(
      'train', path=str(tmp_path), label_key=key, class_map=listed
    )
    found = source.labels().tolist()
    contract.check(source, [(contract.png(i), found[i]) for i in range(3)], [])
    return found

  assert (labels('label'), labels('fine')) == ([0, 1, 2], [10, 11, 12])
  assert labels('name', 'names.txt') == [2, 1, 0]
  assert labels('fine', 'numbers.txt') == [0, 1, 3]
  assert labels('la-bel') == [3, 4, 5]
  for arguments, words in (
    (('name',), "x.tar @ .*label 'c0'.*class_map"),
    (('fine', 'names.txt'), 'x.tar @ .*label .12.* 0 to 2'),
    (('label', 'numbers.txt'), "x.tar @ .*class '0', which is not"),
    (('absent',), "'absent' in .json"),
  ):
    with pytest.raises(UserError, match=words):
      labels(*arguments)


IMAGE, LABEL = ('1.jpg', b'x'), ('1.cls', b'3')


@pytest.mark.parametrize(
  'members, words',
  [
    ([IMAGE], "example '1'.*label"),
    ([LABEL], "example '1'.*one image"),
    ([IMAGE, ('1.png', b'x'), LABEL], 'one image'),
    ([IMAGE, ('1.json', b'{')], "'label' in .json"),
    ([IMAGE, ('1.json', b'[' * 100000)], "'label' in .json"),
    ([IMAGE, ('1.JPG', b'y'), LABEL], '1.JPG @ '),
    ([IMAGE, LABEL, IMAGE, LABEL], "'1'.*1.jpg @ 2048.*1.jpg @ 4096"),
    ([(('1.jpg', '0.jpg', tarfile.LNKTYPE), b''), LABEL], '1.jpg @ .* a link'),
    ([(('1.jpg', '0.jpg', tarfile.SYMTYPE), b''), LABEL], 'the file itself'),
  ],
)
def test_incomplete_examples_are_refused(tmp_path, members, words):
  """The message names shard and example, and what is missing.

  An image that is stored as a link has no bytes in the shard.
  """
  write_tar(tmp_path / 'x.tar', [*samples(0, 1), *members])
  with pytest.raises(UserError, match=f'x.tar.*{words}'):
    tar.Source('train', path=str(tmp_path))


@pytest.mark.parametrize('cut', range(0, 4096, 256))
def test_a_truncated_shard(tmp_path, cut):
  """It is an error, or the complete examples are used."""
  path = tmp_path / 'x.tar'
  write_tar(path, samples(0, 2))  # header, content, header, content for each
  os.truncate(path, cut)
  with pytest.raises(UserError, match='cut short'):
    tar.Source('train', path=str(tmp_path))
  # The first example is complete once a header of the second exists.
  if cut >= 2048 + 512:
    source = tar.Source('train', path=str(tmp_path), on_bad_shard='skip')
    contract.check(source, images(0, 1), [])


def test_compressed_and_empty_shards_are_refused(tmp_path):
  """Compressed ones are recognized by extension or content."""
  with tarfile.open(tmp_path / 'x.tar.gz', 'w:gz'):
    pass
  for path in (tmp_path, tmp_path / 'x.tar.gz'):
    with pytest.raises(UserError, match='gunzip'):
      tar.Source('train', path=str(path))
  os.rename(tmp_path / 'x.tar.gz', tmp_path / 'x.tar')
  with pytest.raises(UserError, match='x.tar is compressed'):
    tar.Source('train', path=str(tmp_path))
  write_tar(tmp_path / 'x.tar', [])
  with pytest.raises(UserError, match=r'train \(0 examples\)'):
    tar.Source('train', path=str(tmp_path))


@pytest.mark.parametrize('between', [0, 2, 18])
def test_concatenated_shards_are_refused(tmp_path, between):
  """`cat a.tar b.tar`: examples after the first end mark would be lost."""
  write_tar(tmp_path / 'a.tar', samples(0, 3))
  write_tar(tmp_path / 'b.tar', samples(3, 6))
  first = (tmp_path / 'a.tar').read_bytes().rstrip(b'\0')
  first += b'\0' * (-len(first) % 512 + 512 * between)
  joined = tmp_path / 'set' / 'x.tar'
  joined.parent.mkdir()
  joined.write_bytes(first + (tmp_path / 'b.tar').read_bytes())
  if not between:  # without the end mark, it is one shard
    contract.check(tar.Source('train', path=str(joined)), images(0, 6), [])
    return
  with pytest.raises(UserError, match='x.tar.* offset 4096 of'):
    tar.Source('train', path=str(joined))
  source = tar.Source('train', path=str(joined), on_bad_shard='skip')
  contract.check(source, images(0, 2), [])


def test_padding_after_the_end_is_allowed(tmp_path):
  """Zeros of any size, as `tar -b 4096` writes them."""
  write_tar(tmp_path / 'x.tar', samples(0, 2))
  with open(tmp_path / 'x.tar', 'ab') as file:
    file.write(bytes(2**21))
  contract.check(tar.Source('train', path=str(tmp_path)), images(0, 2), [])
