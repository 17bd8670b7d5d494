"""Small archives in exactly the layout of the public ImageNet-21k archives."""

import io
import struct
import tarfile
import zlib

import numpy as np
import PIL.Image

from tests import sample_images

# Entries of a synset's tar that must be left out: name, content.
BAD = {
  'damaged.JPEG': b'\xff\xd8\xff no image',
  'empty.JPEG': b'',
  'text.JPEG': b'<html>404</html>',
}


def photograph(seed, kind='.jpg', channels=3):
  """Returns an encoded image unique to the seed, of 5 to 9 pixels per side."""
  rng = np.random.default_rng(seed)
  height, width = rng.integers(5, 10, 2)
  pixels = np.full((height, width, 3), rng.integers(0, 256, 3), np.uint8)
  return sample_images.encode(pixels if channels else pixels[:, :, 0], kind)


def cmyk():
  """Returns a JPEG with four channels, like a few in ImageNet."""
  target = io.BytesIO()
  PIL.Image.new('CMYK', (8, 6), (10, 200, 30, 40)).save(target, 'JPEG')
  return target.getvalue()


def bomb(width, height):
  """Returns a small PNG file whose header claims a large image."""

  def chunk(kind, content):
    check = zlib.crc32(kind + content)
    return (
      struct.pack('>I', len(content))
      + kind
      + content
      + struct.pack('>I', check)
    )

  header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
  return (
    b'\x89PNG\r\n\x1a\n'
    + chunk(b'IHDR', header)
    + chunk(b'IDAT', zlib.compress(bytes(1000)))
    + chunk(b'IEND', b'')
  )


def tar(files):
  """Returns a tar of {name: content, or a TarInfo without content}."""
  target = io.BytesIO()
  with tarfile.open(fileobj=target, mode='w') as archive:
    for name, content in files.items():
      if isinstance(content, tarfile.TarInfo):
        archive.addfile(content)
        continue
      member = tarfile.TarInfo(name)
      member.size = len(content)
      archive.addfile(member, io.BytesIO(content))
  return target.getvalue()


def synset_files(wnid, count, seed):
  """Returns {name: content} of a synset with ordinary images."""
  return {
    f'{wnid}_{i * 7 + seed}.JPEG': photograph(1000 * seed + i)
    for i in range(count)
  }


def synsets(number, count=5):
  """Returns {wnid: {name: content}}, not sorted by name."""
  return {
    wnid: synset_files(wnid, count, seed)
    for seed, wnid in enumerate(f'n{89 * k % 1000:08d}' for k in range(number))
  }


def with_trouble():
  """Returns eight synsets; the second has every oddity of the public archives.

  Returns:
    Contents, and the names in it that have to be left out.
  """
  contents = synsets(8, count=12)
  wnid = list(contents)[1]
  bad = BAD | {
    '../../evil': photograph(50),
    'bomb.JPEG': bomb(60_000, 60_000),
    'line\nbreak.JPEG': b'',
  }
  kept = {
    'grey.JPEG': photograph(51, channels=0),
    'png.JPEG': photograph(52, '.png'),
    'cmyk.JPEG': cmyk(),
  }
  contents[wnid] = contents[wnid] | bad | kept
  return contents, [f'{wnid}/{name}' for name in bad]


def write(path, contents):
  """Writes an archive in the layout that its file name implies.

  winter21_whole.tar contains a directory, and fall11_whole.tar does not.
  """
  has_folder = path.name == 'winter21_whole.tar'
  prefix = 'winter21_whole/' if has_folder else ''
  tars = {f'{prefix}{wnid}.tar': tar(files) for wnid, files in contents.items()}
  with tarfile.open(path, 'w') as archive:
    if has_folder:
      folder = tarfile.TarInfo('winter21_whole')
      folder.type = tarfile.DIRTYPE
      archive.addfile(folder)
    for name, content in tars.items():
      member = tarfile.TarInfo(name)
      member.size = len(content)
      archive.addfile(member, io.BytesIO(content))
  return path


def tree(folder):
  """Returns {relative path: content} of all files below a directory."""
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in sorted(folder.rglob('*'))
    if path.is_file()
  }
