"""Tests of weights by address, from a local server."""

import hashlib

import jax
import numpy as np
import pytest
from huggingface_hub import constants
from web_server import SHA, Web

from vit_jax import load_pretrained
from vit_jax.errors import StorageError, UserError
from vit_jax.models.contract import abstract_params
from vit_jax.models.vit import Model
from vit_jax.weights import download, pretrained

SIZES = dict(patch_size=8, width=16, depth=1, mlp_dim=32, num_heads=2)


@pytest.fixture
def site(tmp_path, monkeypatch):
  """Starts a server for tmp_path/site; every test has its own caches."""
  (tmp_path / 'site').mkdir()
  with Web(tmp_path / 'site').running() as web:
    monkeypatch.setenv('HF_ENDPOINT', web.url)
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    monkeypatch.setattr(constants, 'HF_HUB_CACHE', str(tmp_path / 'hub'))
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    yield web


def saved(path):
  """Writes a small ViT; returns its parameters."""
  model = Model(3, **SIZES, dtype='float32')
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda leaf: rng.normal(size=leaf.shape).astype(np.float32),
    abstract_params(model, (16, 16)),
  )
  about = dict(
    format=1,
    model=dict(name='vit', **SIZES),
    objective={'name': 'supervised'},
    num_classes=3,
    image_size=[16, 16],
    preprocess={},
    class_names=['a', 'b', 'c'],
  )
  pretrained.save(str(path), params, about)
  return params


def equal(loaded, params):
  jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
  return True


def test_hub_repositories_are_loaded(tmp_path, site):
  """By name, and at a revision."""
  folder = tmp_path / 'site' / 'lab' / 'tiny'
  params = saved(f'huggingface:{folder}')
  assert equal(load_pretrained('hf:lab/tiny'), params)
  assert load_pretrained('hf:lab/tiny@v1').class_names == ['a', 'b', 'c']
  count = sum(method == 'GET' for method, path, _ in site.requests)
  load_pretrained(f'hf:lab/tiny@{SHA}')
  again = [path for method, path, _ in site.requests if method == 'GET'][count:]
  assert not any('resolve' in path for path in again)


def test_cached_weights_are_loaded_without_the_hub(tmp_path, site, monkeypatch):
  params = saved(f'huggingface:{tmp_path}/site/lab/tiny')
  load_pretrained('hf:lab/tiny')
  monkeypatch.setenv('HF_ENDPOINT', 'http://127.0.0.1:9')
  assert equal(load_pretrained('hf:lab/tiny'), params)
  with pytest.raises(StorageError, match='hf:lab/other cannot be downloaded'):
    load_pretrained('hf:lab/other')


def test_one_file_of_a_repository_is_loaded(tmp_path, site):
  """Only that file and the settings next to it are downloaded."""
  folder = tmp_path / 'site' / 'lab' / 'files'
  folder.mkdir(parents=True)
  params = saved(folder / 'b.safetensors')
  (folder / 'model.safetensors').write_bytes(b'not this one')
  assert equal(load_pretrained('hf:lab/files/b.safetensors'), params)
  assert not any('model.safetensors' in path for _, path, _ in site.requests)


def test_a_broken_download_is_repeated(tmp_path, site):
  """The connection breaks off once, and the weights are complete."""
  folder = tmp_path / 'site' / 'lab' / 'tiny'
  params = saved(f'huggingface:{folder}')
  site.cut.append((folder / 'model.safetensors').stat().st_size // 2)
  assert equal(load_pretrained('hf:lab/tiny'), params)
  fetched = [path for method, path, _ in site.requests if method == 'GET']
  assert sum('model.safetensors' in path for path in fetched) == 2


@pytest.mark.parametrize(
  'path, words',
  [
    ('hf:lab/absent', 'hf:lab/absent does not exist.*HF_TOKEN'),
    ('hf:lab/tiny@other', 'hf:lab/tiny@other does not exist'),
    ('hf:lab/tiny/no.npz', "no file 'no.npz'"),
    ('hf:tiny', 'hf:ORG/NAME'),
    ('hf:lab/empty', r'no file model\*.safetensors'),
    ('lab/tiny', 'write hf:lab/tiny'),
  ],
)
def test_messages_of_wrong_addresses(tmp_path, site, path, words):
  saved(f'huggingface:{tmp_path}/site/lab/tiny')
  (tmp_path / 'site' / 'lab' / 'empty').mkdir()
  with pytest.raises(UserError, match=words):
    load_pretrained(path)


def test_urls_are_downloaded_once(tmp_path, site):
  """An incomplete download leaves no file."""
  params = saved(tmp_path / 'site' / 'b.npz')
  address = f'{site.url}/b.npz'
  site.cut.append(1000)
  with pytest.raises(StorageError, match='b.npz cannot be downloaded'):
    load_pretrained(address)
  assert not [f for f in (tmp_path / 'cache').rglob('*') if f.is_file()]
  assert equal(load_pretrained(address), params)
  count = len(site.requests)
  assert equal(load_pretrained(address), params)
  assert len(site.requests) == count
  with pytest.raises(UserError, match='c.npz does not exist'):
    load_pretrained(f'{site.url}/c.npz')


def test_the_hash_in_a_file_name_is_checked(tmp_path, site):
  """PyTorch's names end with the beginning of the file's SHA-256."""
  content = b'weights'
  digest = hashlib.sha256(content).hexdigest()
  (tmp_path / 'site' / f'a-{digest[:8]}.bin').write_bytes(content)
  (tmp_path / 'site' / 'a-01234567.bin').write_bytes(content)
  local = download.local_copy(f'{site.url}/a-{digest[:8]}.bin')
  with open(local, 'rb') as copy:
    assert copy.read() == content
  with pytest.raises(StorageError, match='checksum'):
    download.local_copy(f'{site.url}/a-01234567.bin')
