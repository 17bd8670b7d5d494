"""A local folder that stands for a bucket when epath accesses gs://."""

import pathlib

from etils.epath import backend

NAME = 'gs://bucket'


class Bucket:
  """The required part of an epath backend; 'gs://bucket/x' is root/x."""

  def __init__(self, root):
    self.root = root

  def _local(self, path):
    return str(self.root) + str(path).removeprefix(NAME)

  def open(self, path, mode):
    local = pathlib.Path(self._local(path))
    if 'w' in mode:
      local.parent.mkdir(
        parents=True, exist_ok=True
      )  # because objects need no directories
    return open(local, mode)

  def glob(self, pattern):
    found = backend.os_backend.glob(self._local(pattern))
    return [NAME + path.removeprefix(str(self.root)) for path in found]

  def __getattr__(self, name):
    function = getattr(backend.os_backend, name)
    return lambda path, *args, **kwargs: function(
      self._local(path), *args, **kwargs
    )
