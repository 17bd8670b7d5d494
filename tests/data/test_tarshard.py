"""What a tar shard may hold, and what is refused."""

import tarfile

import contract
import pytest
from test_sources_tar import images, samples, write_tar

from vit_jax.data.sources import tar
from vit_jax.errors import UserError


@pytest.fixture(autouse=True)
def cache_home(tmp_path_factory, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))


def test_an_example_that_comes_again(tmp_path):
  """Elsewhere in a shard, or in another, a key may stand for more weight."""
  write_tar(tmp_path / 'x.tar', [*samples(0, 2), *samples(0, 1)])
  source = tar.Source('train', path=str(tmp_path))
  contract.check(source, images(0, 2) + images(0, 1), [])


@pytest.mark.parametrize('kind', [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links(tmp_path, kind):
  """An image that is stored as a link has no bytes in the shard."""
  with tarfile.open(tmp_path / 'x.tar', 'w') as file:
    info = tarfile.TarInfo('1.jpg')
    info.type, info.linkname = kind, '0.jpg'
    file.addfile(info)
    file.addfile(tarfile.TarInfo('1.cls'))
  with pytest.raises(UserError, match="'1.jpg' at offset 0 is a link"):
    tar.Source('train', path=str(tmp_path))


@pytest.mark.parametrize('between', [0, 2, 18])
def test_shards_that_were_joined(tmp_path, between):
  """`cat a.tar b.tar`: what follows the first end mark is not lost silently."""
  write_tar(tmp_path / 'a.tar', samples(0, 3))
  write_tar(tmp_path / 'b.tar', samples(3, 6))
  first = (tmp_path / 'a.tar').read_bytes().rstrip(b'\0')
  first += b'\0' * (-len(first) % 512 + 512 * between)
  joined = tmp_path / 'set' / 'x.tar'
  joined.parent.mkdir()
  joined.write_bytes(first + (tmp_path / 'b.tar').read_bytes())
  if not between:  # without the mark it is one shard
    contract.check(tar.Source('train', path=str(joined)), images(0, 6), [])
    return
  size = joined.stat().st_size
  with pytest.raises(UserError, match=f'x.tar.* offset 4096 of {size} bytes'):
    tar.Source('train', path=str(joined))
  source = tar.Source('train', path=str(joined), on_bad_shard='skip')
  contract.check(source, images(0, 2), [])


def test_padding_after_the_end(tmp_path):
  """Zeros up to any size belong to the end, as `tar -b 4096` writes them."""
  write_tar(tmp_path / 'x.tar', samples(0, 2))
  with open(tmp_path / 'x.tar', 'ab') as file:
    file.write(bytes(2**21))
  contract.check(tar.Source('train', path=str(tmp_path)), images(0, 2), [])


def test_a_shard_without_examples(tmp_path):
  """As its folder, when no other has any."""
  write_tar(tmp_path / 'x.tar', [('a/', b''), ('a/.hidden', b'')])
  with pytest.raises(UserError, match='without examples'):
    tar.Source('train', path=str(tmp_path))


@pytest.mark.parametrize('label', ['1000000', '9' * 11, '9' * 20, '9' * 900])
def test_labels_that_are_no_classes(tmp_path, label):
  """Without a list, numbers in the millions are identifiers, not classes."""
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
