"""Archives are read in memory, whole or not at all, whatever they hold."""

import os
import pathlib
import tarfile

import pytest

from tests import archives
from tests.faults.counts import injected
from vit_jax.errors import UserError
from vit_jax.prepare import archive, images

CONTENTS = archives.synsets(3, count=4)


def as_source(tmp_path, kind):
  """The same synsets in each form that a source may have."""
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
  """Synsets and their images come as they were put in."""
  source = as_source(tmp_path, kind)
  found = list(archive.synsets(source))
  content = {
    synset.wnid: {item.name: item.data for item in archive.pictures(synset)}
    for synset in found
  }
  assert content == CONTENTS
  shares = [synset.share for synset in found]
  assert shares == sorted(shares) and 0.7 < shares[-1] <= 1
  if not kind.endswith('gz'):
    assert archive.num_bytes(source) >= sum(synset.size for synset in found)


def pictures_of(data):
  synset = archive.Synset('n00000001', '', 0, len(data), 1.0, data)
  return list(archive.pictures(synset))


def link(name, target):
  member = tarfile.TarInfo(name)
  member.type, member.linkname = tarfile.SYMTYPE, target
  return member


@pytest.mark.parametrize(
  'name', ['../../evil', '/etc/evil', 'a/../../evil', 'a//evil', 'x' * 2000]
)
def test_unsafe_names_are_skipped(name):
  """A name that leaves its directory, or is absurd, is listed and not used."""
  injected('a name that leaves its archive')
  good = archives.photograph(1)
  found = pictures_of(archives.tar({name: good, './good.JPEG': good}))
  assert [type(item) for item in found] == [archive.Skipped, archive.Picture]
  assert found[1] == ('good.JPEG', good)


def test_links_are_skipped():
  """A link is not followed, inside the archive or out of it."""
  injected('a link in an archive')
  found = pictures_of(
    archives.tar({'a': link('a.JPEG', '/etc/passwd'), 'b.JPEG': b'b'})
  )
  assert 'link' in found[0].reason and found[1] == ('b.JPEG', b'b')


def test_damaged_synset_gives_what_comes_before():
  """A tar that is cut short, or overwritten, is listed with its damage."""
  files = archives.synset_files('n00000001', 3, 0)
  data = archives.tar(files)
  begin = [i for i in range(0, len(data), 512) if data[i : i + 3] == b'n00']
  names = list(files)
  for damaged in (
    data[: begin[2] + 600],
    data[: begin[2]] + b'x' * 512 + data[begin[2] + 512 :],
  ):
    found = pictures_of(damaged)
    assert [item.name for item in found] == [*names[:2], 'n00000001.tar']
    assert found[2].reason.startswith('damaged after')
  assert pictures_of(b'')[0].reason.startswith('damaged after 0')
  assert pictures_of(b'\0' * 10240) == []


def test_huge_claims_allocate_nothing():
  """A header that claims more than the file has is damage."""
  data = bytearray(archives.tar({'n00000001_1.JPEG': b'x'}))
  member = tarfile.TarInfo('n00000001_1.JPEG')
  member.size = 2**40
  data[:512] = member.tobuf(tarfile.GNU_FORMAT)
  (found,) = pictures_of(bytes(data))
  assert isinstance(found, archive.Skipped) and 'damaged' in found.reason


@pytest.mark.parametrize('kind', ['fall11_whole.tar', 'winter21_whole.tar.gz'])
def test_truncated_archive_is_told(tmp_path, kind):
  """A partial download is found, not taken for a smaller data set."""
  path = as_source(tmp_path, kind)
  os.truncate(path, path.stat().st_size * 2 // 3)
  with pytest.raises(UserError, match='not a complete tar archive'):
    list(archive.synsets(path))


def test_damaged_header_is_told(tmp_path):
  """Python's tarfile would end there without a word."""
  path = as_source(tmp_path, 'fall11_whole.tar')
  second = list(archive.synsets(path))[1]
  data = bytearray(path.read_bytes())
  data[second.offset - 512 : second.offset] = b'x' * 512
  path.write_bytes(data)
  with pytest.raises(UserError, match=r'byte [\d,]+ is not'):
    list(archive.synsets(path))


def test_sources_that_will_not_do(tmp_path):
  """Nothing there, no archive, an archive of something else."""
  text = tmp_path / 'text.tar'
  text.write_text('no archive' * 100)
  other = tmp_path / 'other.tar'
  other.write_bytes(archives.tar({'cat/1.jpg': b'x', 'notes.txt': b'y'}))
  for path, message in (
    (tmp_path / 'nowhere', 'does not exist'),
    (text, 'not a complete tar'),
    (other, 'contains no nXXXXXXXX.tar'),
    (pathlib.Path(tmp_path), 'contains no nXXXXXXXX.tar'),
  ):
    with pytest.raises(UserError, match=message):
      list(archive.synsets(path))


def test_images_are_judged_by_content():
  """Names say nothing; greyscale, PNG and CMYK are images, bombs are not."""
  for data in (
    archives.photograph(1),
    archives.photograph(1, channels=0),
    archives.photograph(1, '.png'),
    archives.photograph(1, '.webp'),
    archives.cmyk(),
  ):
    assert images.problem(data) is None
  png, jpeg = archives.photograph(1, '.png'), archives.photograph(1)
  cut = [png[: len(png) // 2], jpeg[: len(jpeg) // 2]]
  for data in (*archives.BAD.values(), *cut):
    assert images.problem(data)
  assert 'pixels' in (images.problem(archives.bomb(60_000, 60_000)) or '')
