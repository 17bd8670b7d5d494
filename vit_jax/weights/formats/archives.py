"""Checks of zip archives (`.npz`, `.pth`) before anything is unpacked."""

import collections
import zipfile
from typing import IO

# Weights hardly compress; zeros compress by about 1,000. An archive that is
# larger than the first limit and unpacks to more than the second times its
# size is taken for damaged or hostile.
_UNSUSPICIOUS_BYTES = 2**26
_MAX_RATIO = 100


def check_sizes(archive: zipfile.ZipFile, archive_bytes: int) -> None:
  """Checks that an archive is plausible, by its directory only.

  Args:
    archive: open archive.
    archive_bytes: size of its file.

  Raises:
    ValueError: two members have one name, or the archive unpacks to much more
      than its own size.
  """
  names = collections.Counter(each.filename for each in archive.infolist())
  repeated = [name for name, count in names.items() if count > 1]
  if repeated:
    raise ValueError(f'it has several members named {repeated[0]}')
  total = sum(each.file_size for each in archive.infolist())
  if total > max(_UNSUSPICIOUS_BYTES, _MAX_RATIO * archive_bytes):
    raise ValueError(
      f'its {archive_bytes:,} bytes would unpack to {total:,}, which weights '
      'do not do'
    )


def check_contents(file: IO[bytes], archive_bytes: int) -> None:
  """Checks a whole archive against its checksums; a piece at a time in memory.

  Args:
    file: open file; one that is not a zip archive passes.
    archive_bytes: size of the file.

  Raises:
    ValueError: a checksum differs, or `check_sizes` refuses the archive.
    zipfile.BadZipFile: the archive is damaged otherwise.
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
