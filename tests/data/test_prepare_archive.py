"""Tests of reading archives in memory."""

import os
import pathlib
import tarfile

import pytest

from tests import archives
from tests.faults.counts import injected
from vit_jax.errors import UserError
from vit_jax.prepare import imagenet21k, shards

CONTENTS = archives.synsets(3, count=4)


def as_source(tmp_path, kind):
  """Returns the same synsets in each form that a source may have."""
  if kind != 'directory':
    return archives.write(tmp_path / kind, CONTENTS)
  folder = tmp_path / kind
  folder.mkdir()
  (folder / 'ReadMe.txt').write_text('not a synset')
  for wnid, files in CONTENTS.items():
    (folder / f'{wnid}.tar').write_bytes(archives.tar(files))
  return folder


@pytest.mark.parametrize(
  'kind', ['fall11_whole.tar', 'winter21_whole.tar.gz', 'directory']
)
def test_same_content_in_every_layout(tmp_path, kind):
  """Synsets and their images are those that were written."""
  source = as_source(tmp_path, kind)
  found = list(imagenet21k.synsets(source))
  content = {
    synset.wnid: dict(imagenet21k.pictures(synset)) for synset in found
  }
  assert content == CONTENTS
  if not kind.endswith('gz'):
    assert imagenet21k.num_bytes(source) >= sum(synset.size for synset in found)


def pictures_of(data):
  synset = imagenet21k.Synset('n00000001', '', 0, len(data), data)
  return list(imagenet21k.pictures(synset))


def link(name, target):
  member = tarfile.TarInfo(name)
  member.type, member.linkname = tarfile.SYMTYPE, target
  return member


@pytest.mark.parametrize(
  'name', ['../../evil', '/etc/evil', 'a/../../evil', 'a//evil']
)
def test_unsafe_names_are_skipped(name):
  """A name that leaves its directory is listed and not used."""
  injected('a name that leaves its archive')
  good = archives.photograph(1)
  found = pictures_of(archives.tar({name: good, './good.JPEG': good}))
  assert isinstance(found[0], shards.Skipped)
  assert found[1] == ('good.JPEG', good)


def test_links_are_skipped():
  """Links inside the archive or to its outside are not followed."""
  injected('a link in an archive')
  found = pictures_of(
    archives.tar({'a': link('a.JPEG', '/etc/passwd'), 'b.JPEG': b'b'})
  )
  assert 'link' in found[0].reason and found[1] == ('b.JPEG', b'b')


def test_a_damaged_synset_gives_the_images_before_the_damage():
  """The damage is listed."""
  files = archives.synset_files('n00000001', 3, 0)
  data = archives.tar(files)
  begin = [i for i in range(0, len(data), 512) if data[i : i + 3] == b'n00']
  names = list(files)
  for damaged in (
    data[: begin[2] + 600],
    data[: begin[2]] + b'x' * 512 + data[begin[2] + 512 :],
  ):
    found = pictures_of(damaged)
    assert [item[0] for item in found] == [*names[:2], 'n00000001.tar']
    assert found[2].reason.startswith('damaged after')
  assert pictures_of(b'')[0].reason.startswith('damaged after 0')
  assert pictures_of(b'\0' * 10240) == []


@pytest.mark.parametrize('kind', ['fall11_whole.tar', 'winter21_whole.tar.gz'])
def test_a_truncated_archive_is_refused(tmp_path, kind):
  """It is not used as a smaller dataset."""
  path = as_source(tmp_path, kind)
  os.truncate(path, path.stat().st_size * 2 // 3)
  with pytest.raises(UserError, match='not a complete archive'):
    list(imagenet21k.synsets(path))


def test_a_damaged_header_is_refused(tmp_path):
  """Python's tarfile would end there silently."""
  path = as_source(tmp_path, 'fall11_whole.tar')
  second = list(imagenet21k.synsets(path))[1]
  data = bytearray(path.read_bytes())
  data[second.offset - 512 : second.offset] = b'x' * 512
  path.write_bytes(data)
  with pytest.raises(UserError, match=r'byte [\d,]+ is not'):
    list(imagenet21k.synsets(path))


def test_wrong_sources_are_refused(tmp_path):
  """A missing file, a file that is not an archive, an archive of other data."""
  text = tmp_path / 'text.tar'
  text.write_text('no archive' * 100)
  other = tmp_path / 'other.tar'
  other.write_bytes(archives.tar({'cat/1.jpg': b'x', 'notes.txt': b'y'}))
  for path, message in (
    (tmp_path / 'nowhere', 'No such file'),
    (text, 'not a complete archive'),
    (other, 'contains no nXXXXXXXX.tar'),
    (pathlib.Path(tmp_path), 'contains no nXXXXXXXX.tar'),
  ):
    with pytest.raises(UserError, match=message):
      list(imagenet21k.synsets(path))
