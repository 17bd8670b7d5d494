"""Tests of weights by address, from a local server."""

import datetime
import hashlib
import os
import pathlib
import threading
import time

import huggingface_hub
import jax
import numpy as np
import pytest
import safetensors.numpy
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from huggingface_hub import constants
from tiny_vit import save_classifier
from web_server import SHA, Proxy, Web

from vit_jax import load_pretrained
from vit_jax.errors import DownloadError, UserError
from vit_jax.processes import peers
from vit_jax.weights import download


@pytest.fixture
def caches(tmp_path, monkeypatch):
  """Gives every test its own caches, and no pauses."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
  monkeypatch.setattr(download, 'PAUSES_S', (0.0, 0.0, 0.0))


@pytest.fixture
def site(caches, tmp_path, monkeypatch):
  """Starts a server for tmp_path/site, which is also that of the hub."""
  (tmp_path / 'site').mkdir()
  with Web(tmp_path / 'site').running() as web:
    monkeypatch.setenv('HF_ENDPOINT', web.url)
    yield web


def fetched(site):
  """Returns the paths of the files that have been requested."""
  return [path for method, path, _ in site.requests if method == 'GET']


def equal(loaded, params):
  jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
  return True


def cached(tmp_path):
  return [file for file in (tmp_path / 'cache').rglob('*') if file.is_file()]


@pytest.mark.slow
def test_hub_repositories_are_loaded(tmp_path, site):
  """By name, and at a revision."""
  params = save_classifier(f'huggingface:{tmp_path}/site/lab/tiny')
  assert equal(load_pretrained('hf:lab/tiny'), params)
  assert equal(load_pretrained('hf:lab/tiny@v1'), params)
  site.requests.clear()
  load_pretrained(f'hf:lab/tiny@{SHA}')
  assert not any('resolve' in path for path in fetched(site))


def test_cached_weights_are_loaded_without_the_hub(tmp_path, site, monkeypatch):
  params = save_classifier(f'huggingface:{tmp_path}/site/lab/tiny')
  load_pretrained('hf:lab/tiny')
  monkeypatch.setenv('HF_ENDPOINT', 'http://127.0.0.1:9')
  assert equal(load_pretrained('hf:lab/tiny'), params)
  with pytest.raises(DownloadError, match='hf:lab/other cannot be downloaded'):
    load_pretrained('hf:lab/other')


def test_one_file_of_a_repository_is_loaded(tmp_path, site):
  """Only that file and the settings next to it are downloaded."""
  folder = tmp_path / 'site' / 'lab' / 'files'
  folder.mkdir(parents=True)
  params = save_classifier(str(folder / 'b.safetensors'))
  (folder / 'model.safetensors').write_bytes(b'not this one')
  assert equal(load_pretrained('hf:lab/files/b.safetensors'), params)
  assert not any('model.safetensors' in path for _, path, _ in site.requests)


def test_a_broken_download_is_repeated(tmp_path, site):
  """The connection breaks off once; older repositories have pickles."""
  torch = pytest.importorskip('torch')
  folder = tmp_path / 'site' / 'lab' / 'old'
  params = save_classifier(f'huggingface:{folder}')
  arrays = safetensors.numpy.load_file(folder / 'model.safetensors')
  (folder / 'model.safetensors').unlink()
  state = {name: torch.from_numpy(array) for name, array in arrays.items()}
  torch.save(state, folder / 'pytorch_model.bin')
  site.cut.append((folder / 'pytorch_model.bin').stat().st_size // 2)
  assert equal(load_pretrained('hf:lab/old'), params)
  assert sum('pytorch_model.bin' in path for path in fetched(site)) == 2


@pytest.mark.parametrize(
  'path, words',
  [
    ('hf:lab/absent', 'hf:lab/absent.* 404.*may not exist.*HF_TOKEN'),
    ('hf:lab/tiny@other', 'hf:lab/tiny@other.* may not exist'),
    ('hf:lab/tiny/no.npz', "no file 'no.npz'"),
    ('hf:tiny', 'hf:ORG/NAME'),
    ('hf:lab/empty', r'no file model\*.safetensors'),
    ('lab/tiny', 'write hf:lab/tiny'),
  ],
)
def test_messages_of_wrong_addresses(tmp_path, site, path, words):
  save_classifier(f'huggingface:{tmp_path}/site/lab/tiny')
  (tmp_path / 'site' / 'lab' / 'empty').mkdir()
  with pytest.raises(UserError, match=words):
    load_pretrained(path)


def test_urls_are_downloaded_once(tmp_path, site):
  """An incomplete download leaves no file."""
  params = save_classifier(str(tmp_path / 'site' / 'b.npz'))
  address = f'{site.url}/b.npz'
  site.cut += 4 * [1000]
  with pytest.raises(DownloadError, match='b.npz cannot be downloaded'):
    load_pretrained(address)
  assert not cached(tmp_path)
  assert equal(load_pretrained(address), params)
  site.requests.clear()
  assert equal(load_pretrained(address), params)
  assert not site.requests


def test_names_of_files(tmp_path, site):
  """PyTorch's contain the beginning of the SHA-256; any length is allowed."""
  content = b'weights'
  digest = hashlib.sha256(content).hexdigest()[:8]
  wrong = ('a-0123456f.bin', f'a-{"0f" * 32}.pth')
  long = 200 * 'a' + '.npz'
  uuid = 'a-550e8400-e29b-41d4-a716-44665544000f.npz'
  others = ('a-20240115.npz', 'a-00050000.npz', uuid)  # not hashes
  for name in (f'a-{digest}.bin', *wrong):
    (tmp_path / 'site' / name).write_bytes(content)
  for name in (*others, long):
    (tmp_path / 'site' / name).write_bytes(zip_file(tmp_path))
  local = download.local_copy(f'{site.url}/a-{digest}.bin')
  assert pathlib.Path(local).read_bytes() == content
  for name in wrong:
    with pytest.raises(DownloadError, match='checksum'):
      download.local_copy(f'{site.url}/{name}')
  for name in others:
    download.local_copy(f'{site.url}/{name}')
  local = download.local_copy(f'{site.url}/{long}')
  assert local.endswith('a.npz') and len(os.path.basename(local)) == 50


def zip_file(tmp_path):
  np.savez(tmp_path / 'any.npz', w=np.ones(100, np.float32))
  return (tmp_path / 'any.npz').read_bytes()


@pytest.mark.parametrize('status', [408, 429, 500, 503, 401, 403, 404, 410])
@pytest.mark.parametrize('address', ['{}/a.npz', 'hf:lab/tiny'])
def test_outages_and_wrong_addresses_have_their_exit_codes(
  site, status, address
):
  """1 after four requests, or 2 after one; the message has the status."""
  site.failures += 4 * [(status, {})]
  outage = status in (408, 429) or status >= 500
  kind = DownloadError if outage else UserError
  with pytest.raises(kind, match=f'HTTP {status}') as error:
    download.local_copy(address.format(site.url))
  assert len(site.requests) == (4 if outage else 1)
  assert peers.exit_status(error.value)[0] == (1 if outage else 2)


@pytest.mark.parametrize('host', ['127.0.0.1:9', 'vit-jax.invalid'])
def test_servers_that_cannot_be_reached_are_outages(host):
  """Refused connections and unknown hosts are tried again."""
  pauses = []
  with pytest.raises(DownloadError, match='Check the address') as error:
    download.local_copy(f'http://{host}/a.npz', sleep=pauses.append)
  assert len(pauses) == 3 and host in str(error.value)


def test_a_hanging_server_is_not_waited_for(site, monkeypatch):
  assert download.TIMEOUT_S <= 60
  monkeypatch.setattr(download, 'TIMEOUT_S', 0.2)
  site.stopped = threading.Event()
  start = time.monotonic()
  with pytest.raises(DownloadError, match='no data for 0.2 s'):
    download.local_copy(f'{site.url}/a.npz')
  assert time.monotonic() - start < 20
  site.stopped.set()


def test_offline_weights_are_not_requested(site, monkeypatch):
  monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
  with pytest.raises(UserError, match='HF_HUB_OFFLINE'):
    download.local_copy('hf:lab/other', sleep=pytest.fail)
  assert not site.requests


@pytest.mark.parametrize('ending', ['npz', 'safetensors', 'pth', 'bin'])
@pytest.mark.parametrize('fault', ['cut', 'damaged'])
def test_damaged_downloads_are_not_kept(tmp_path, site, ending, fault):
  """The server does not send the size, so it cannot be compared."""
  site.sized = False
  file = tmp_path / 'site' / f'a.{ending}'
  if ending == 'npz':
    file.write_bytes(zip_file(tmp_path))
  elif ending == 'safetensors':
    safetensors.numpy.save_file({'w': np.ones(100, np.float32)}, file)
  else:
    torch = pytest.importorskip('torch')
    torch.save({'w': torch.ones(100)}, file)
  content = bytearray(file.read_bytes())
  address = f'{site.url}/{file.name}'
  if fault == 'cut':
    site.cut.append(len(content) - 200)
  else:
    # A .safetensors file has no checksum; only its header can be checked.
    values = content.index(np.ones(100, np.float32).tobytes())
    content[3 if ending == 'safetensors' else values] ^= 1
    file.write_bytes(content)
  with pytest.raises(DownloadError, match='not kept') as error:
    download.local_copy(address)
  assert address in str(error.value)
  assert not cached(tmp_path)


@pytest.mark.parametrize('name', ['a.npz', 'a.pth', 'a-01234567.bin', 'a'])
def test_a_web_page_is_the_users_error(tmp_path, site, name):
  """A repetition does not help, so it is not tried again."""
  page = tmp_path / 'site' / name
  page.write_bytes(b'\n<!DOCTYPE html><html>Log in</html>')
  with pytest.raises(UserError, match='is a web page') as error:
    download.local_copy(f'{site.url}/{name}', sleep=pytest.fail)
  assert peers.exit_status(error.value)[0] == 2
  assert not cached(tmp_path)


@pytest.fixture
def proxy(caches, monkeypatch):
  """Starts a proxy, through which nothing can be reached but this machine.

  It is also the server of all http:// addresses.
  """
  for name in ('http_proxy', 'https_proxy', 'no_proxy', 'all_proxy'):
    monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv(name.upper(), raising=False)
  for name in ('SSL_CERT_FILE', 'SSL_CERT_DIR', 'REQUESTS_CA_BUNDLE'):
    monkeypatch.setenv(name, '')  # so that changes are undone, too
    monkeypatch.delenv(name)
  huggingface_hub.close_session()  # it has the proxies of its first request
  with Proxy().running() as started:
    yield started
  huggingface_hub.close_session()


@pytest.mark.parametrize('address', ['{}/a.bin', 'hf:lab/tiny'])
@pytest.mark.parametrize('excluded', ['', 'weights.invalid'])
def test_proxies_of_the_environment_are_used(
  proxy, monkeypatch, address, excluded
):
  """Except for the hosts in NO_PROXY."""
  monkeypatch.setenv('HTTP_PROXY', proxy.url)
  monkeypatch.setenv('NO_PROXY', excluded)
  monkeypatch.setenv('HF_ENDPOINT', 'http://weights.invalid')
  with pytest.raises((UserError, DownloadError)):
    download.local_copy(address.format('http://weights.invalid'))
  assert bool(proxy.requests) == (not excluded)
  assert all('weights.invalid' in request for request in proxy.requests)


@pytest.mark.parametrize('key', ['SSL_CERT_FILE', 'REQUESTS_CA_BUNDLE'])
@pytest.mark.parametrize('address', ['{}/a.npz', 'hf:lab/tiny'])
def test_certificates_of_the_environment_are_trusted(
  tmp_path, proxy, monkeypatch, key, address
):
  """https:// through a proxy, with a certificate of one's own.

  Without it, the message names the variable to set.
  """
  site = tmp_path / 'site'
  save_classifier(f'huggingface:{site}/lab/tiny')
  (site / 'a.npz').write_bytes(zip_file(tmp_path))
  with Web(site, certificate(tmp_path)).running() as web:
    port = web.url.rpartition(':')[2]
    url = f'https://localhost:{port}'
    monkeypatch.setenv('HTTPS_PROXY', proxy.url)
    monkeypatch.setenv('HF_ENDPOINT', url)
    with pytest.raises(UserError, match='SSL_CERT_FILE'):
      download.local_copy(address.format(url))
    huggingface_hub.close_session()
    monkeypatch.setenv(key, str(tmp_path / 'own.pem'))
    assert download.local_copy(address.format(url))
  assert f'localhost:{port}' in proxy.requests


def certificate(folder):
  """Writes a certificate of localhost with its key; returns the path."""
  key = ec.generate_private_key(ec.SECP256R1())
  name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, 'localhost')])
  now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
  alternative = x509.SubjectAlternativeName([x509.DNSName('localhost')])
  made = (
    x509.CertificateBuilder(name, name, key.public_key())
    .serial_number(1)
    .not_valid_before(now - day)
    .not_valid_after(now + day)
    .add_extension(alternative, critical=False)
    .sign(key, hashes.SHA256())
  )
  pem = serialization.Encoding.PEM
  kind = serialization.PrivateFormat.PKCS8
  private = key.private_bytes(pem, kind, serialization.NoEncryption())
  (folder / 'own.pem').write_bytes(made.public_bytes(pem) + private)
  return folder / 'own.pem'
