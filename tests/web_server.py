"""A web server for files that also imitates the Hugging Face Hub."""

import contextlib
import http.server
import json
import pathlib
import re
import select
import socket
import ssl
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

  def __init__(
    self, folder: pathlib.Path, certificate: pathlib.Path | None = None
  ):
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
    if certificate is not None:
      self.url = self.url.replace('http', 'https')
      context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
      context.load_cert_chain(certificate)
      # The handshake is in the thread of the request, not of the server.
      self._server.socket = context.wrap_socket(
        self._server.socket, server_side=True, do_handshake_on_connect=False
      )
      self._server.handle_error = lambda *args: None  # a refused certificate

  @contextlib.contextmanager
  def running(self) -> Iterator['Web']:
    """Serves files within the context."""
    with _serving(self._server):
      yield self


class Proxy:
  """A proxy on this machine, whose requests for files end with 404.

  Attributes:
    url: its address.
    requests: address of each request, or HOST:PORT of each tunnel.
  """

  def __init__(self):
    self.requests: list[str] = []
    proxy = self

    class Handler(http.server.BaseHTTPRequestHandler):
      def do_GET(self):
        proxy.requests.append(self.path)
        self.send_error(404)

      do_HEAD = do_GET

      def do_CONNECT(self):
        proxy.requests.append(self.path)
        port = int(self.path.rpartition(':')[2])
        with socket.create_connection(('127.0.0.1', port)) as target:
          self.send_response(200)
          self.end_headers()
          pairs = {self.connection: target, target: self.connection}
          while data := self.received(pairs):
            pairs[data[0]].sendall(data[1])
        self.close_connection = True

      def received(self, pairs):
        """Returns a socket and its next bytes; None at the end."""
        ready, _, _ = select.select([*pairs], [], [], 10)
        with contextlib.suppress(OSError):
          if ready and (data := ready[0].recv(2**16)):
            return ready[0], data
        return None

      def log_message(self, *args):
        del args

    self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    self.url = f'http://127.0.0.1:{self._server.server_port}'

  @contextlib.contextmanager
  def running(self) -> Iterator['Proxy']:
    """Forwards requests within the context."""
    with _serving(self._server):
      yield self


@contextlib.contextmanager
def _serving(server: http.server.HTTPServer) -> Iterator[None]:
  server_thread = threading.Thread(target=server.serve_forever, args=(0.05,))
  server_thread.start()
  try:
    yield
  finally:
    server.shutdown()
    server.server_close()
    server_thread.join()
