"""A web server for files that also imitates the Hugging Face Hub."""

import contextlib
import http.server
import json
import pathlib
import re
import threading
from collections.abc import Iterator

SHA = '0123456789abcdef0123456789abcdef01234567'


class Web:
  """A server on this machine.

  Attributes:
    url: its address.
    requests: (method, path, Range header or None) of each request.
    cut: numbers of bytes after which the next bodies break off.
    failures: (status, headers) of the next answers.
    sized: whether answers have a Content-Length.
    stopped: if it is not None, answers wait for this event.
  """

  def __init__(self, folder: pathlib.Path):
    self.requests: list[tuple[str, str, str | None]] = []
    self.cut: list[int] = []
    self.failures: list[tuple[int, dict[str, str]]] = []
    self.sized = True
    self.stopped: threading.Event | None = None
    web = self

    class Handler(http.server.BaseHTTPRequestHandler):
      protocol_version = 'HTTP/1.1'

      def do_HEAD(self):
        self.do_GET()

      def do_GET(self):
        path = self.path.partition('?')[0]
        web.requests.append((self.command, path, self.headers.get('Range')))
        if web.stopped is not None:
          web.stopped.wait(60)
          self.close_connection = True
          return None
        if web.failures:
          status, headers = web.failures.pop(0)
          return self.send(status, b'', headers)
        repo = re.fullmatch(r'/api/models/(.+?)/(revision|tree)/([^/]+)', path)
        if repo:
          return self.answer_api(folder / repo[1], *repo.groups())
        file = folder / re.sub(r'/resolve/[^/]+/', '/', path)[1:]
        if not file.is_file():
          return self.send(404, b'', {'X-Error-Code': 'EntryNotFound'})
        headers = {'ETag': f'"{abs(hash(path)):x}"', 'X-Repo-Commit': SHA}
        content, start = file.read_bytes(), self.headers.get('Range')
        if start is None:
          return self.send(200, content, headers)
        first = int(start.removeprefix('bytes=').partition('-')[0])
        span = f'bytes {first}-{len(content) - 1}/{len(content)}'
        return self.send(
          206, content[first:], {**headers, 'Content-Range': span}
        )

      def answer_api(self, place, name, kind, revision):
        if not place.is_dir():
          return self.send(404, b'', {'X-Error-Code': 'RepoNotFound'})
        if revision not in ('main', 'v1', SHA):
          return self.send(404, b'', {'X-Error-Code': 'RevisionNotFound'})
        files = [file for file in place.iterdir() if file.is_file()]
        listed = [
          dict(type='file', path=f.name, size=f.stat().st_size, oid=SHA)
          for f in files
        ]
        siblings = [{'rfilename': file.name} for file in files]
        model = dict(id=name, sha=SHA, siblings=siblings)
        body = json.dumps(model if kind == 'revision' else listed).encode()
        return self.send(200, body, {'Content-Type': 'application/json'})

      def send(self, status, body, headers):
        self.send_response(status)
        for key, value in headers.items():
          self.send_header(key, value)
        if web.sized or not body:
          self.send_header('Content-Length', str(len(body)))
        else:
          self.close_connection = True
        self.end_headers()
        if self.command == 'HEAD':
          return
        if web.cut and len(body) > web.cut[0]:
          body = body[: web.cut.pop(0)]
          self.close_connection = True
        self.wfile.write(body)

      def log_message(self, *args):
        del args

    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self.url = f'http://127.0.0.1:{self._server.server_port}'

  @contextlib.contextmanager
  def running(self) -> Iterator['Web']:
    """Serves files within the context."""
    thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
    thread.start()
    try:
      yield self
    finally:
      self._server.shutdown()
      self._server.server_close()
      thread.join()
