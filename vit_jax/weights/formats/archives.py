"""Checks zip archives (`.npz`, `.pth`) before they are unpacked."""

import collections
import zipfile
from typing import IO

# Weights can hardly be compressed, but zeros by a factor of about 1,000. An
# archive is assumed to be damaged or malicious if it unpacks to more than
# `_UNSUSPICIOUS_BYTES` and to more than `_MAX_RATIO` times its own size.
_UNSUSPICIOUS_BYTES = 2**26
_MAX_RATIO = 100


def check_sizes(archive: zipfile.ZipFile, archive_bytes: int) -> None:
  """Checks the names and unpacked sizes that an archive lists.

  Args:
    archive: open archive.
    archive_bytes: size of the file.

  Raises:
    ValueError: two members have the same name, or the unpacked size is much
      larger than the archive.
  """
  names = collections.Counter(each.filename for each in archive.infolist())
  repeated = [name for name, count in names.items() if count > 1]
  if repeated:
    raise ValueError(f'it has several members named {repeated[0]}')
  total = sum(each.file_size for each in archive.infolist())
  if total > max(_UNSUSPICIOUS_BYTES, _MAX_RATIO * archive_bytes):
    raise ValueError(
      f'its {archive_bytes:,} bytes would unpack to {total:,}, which is not '
      'possible for weights'
    )


def check_contents(file: IO[bytes], archive_bytes: int) -> None:
  """Checks the checksums of an archive, without reading it into memory.

  Args:
    file: open file; a file that is not a zip archive is accepted.
    archive_bytes: size of the file.

  Raises:
    ValueError: a checksum differs, or `check_sizes` rejects the archive.
    zipfile.BadZipFile: the archive is damaged in another way.
  """
  if not zipfile.is_zipfile(file):
    return  # PyTorch before 1.6 wrote plain pickles
  file.seek(0)
  with zipfile.ZipFile(file) as archive:
    check_sizes(archive, archive_bytes)
    damaged = archive.testzip()
  file.seek(0)
  if damaged is not None:
    raise ValueError(f'the checksum (CRC) of its member {damaged} differs')
