"""Tests of the contents of tar shards."""

import tarfile

import contract
import pytest
from test_sources_tar import images, samples, write_tar

from vit_jax.data.sources import tar
from vit_jax.errors import UserError


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))


def test_a_repeated_key_is_another_example(tmp_path):
  """A key may occur again, later in a shard or in another one."""
  write_tar(tmp_path / 'x.tar', [*samples(0, 2), *samples(0, 1)])
  source = tar.Source('train', path=str(tmp_path))
  contract.check(source, images(0, 2) + images(0, 1), [])


@pytest.mark.parametrize('kind', [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_in_a_shard_are_refused(tmp_path, kind):
  """An image that is stored as a link has no bytes in the shard."""
  with tarfile.open(tmp_path / 'x.tar', 'w') as file:
    info = tarfile.TarInfo('1.jpg')
    info.type, info.linkname = kind, '0.jpg'
    file.addfile(info)
    file.addfile(tarfile.TarInfo('1.cls'))
  with pytest.raises(UserError, match='members 1.jpg @ 0'):
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
  size = joined.stat().st_size
  with pytest.raises(UserError, match=f'x.tar.* offset 4096 of {size} bytes'):
    tar.Source('train', path=str(joined))
  source = tar.Source('train', path=str(joined), on_bad_shard='skip')
  contract.check(source, images(0, 2), [])


def test_padding_after_the_end_is_allowed(tmp_path):
  """Zeros of any size, as `tar -b 4096` writes them."""
  write_tar(tmp_path / 'x.tar', samples(0, 2))
  with open(tmp_path / 'x.tar', 'ab') as file:
    file.write(bytes(2**21))
  contract.check(tar.Source('train', path=str(tmp_path)), images(0, 2), [])


def test_a_shard_without_examples_is_refused(tmp_path):
  """The same holds if no shard of a folder has examples."""
  write_tar(tmp_path / 'x.tar', [('a/', b''), ('a/.hidden', b'')])
  with pytest.raises(UserError, match='without examples'):
    tar.Source('train', path=str(tmp_path))


@pytest.mark.parametrize('label', ['1000000', '9' * 11, '9' * 20, '9' * 900])
def test_labels_in_the_millions_are_refused(tmp_path, label):
  """Without a list of classes, they are identifiers."""
  members = [('1.png', contract.png(1)), ('1.cls', label.encode())]
  write_tar(tmp_path / 'x.tar', [*samples(0, 1), *members])
  with pytest.raises(UserError) as error:
    tar.Source('train', path=str(tmp_path))
  for word in ('x.tar @ 2560', label[:50], '0 to 999,999', 'source.class_map'):
    assert word in str(error.value)
  assert len(str(error.value)) < 500
  listed = tmp_path / 'classes.txt'
  listed.write_text(f'0\n{label}\n')
  source = tar.Source('train', path=str(tmp_path), class_map=str(listed))
  assert [source[i]['label'] for i in range(2)] == [0, 1]
