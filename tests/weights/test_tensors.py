"""Tests of files of tensors: PyTorch's checkpoints, damage, and code."""

import argparse
import pathlib
import re
import struct

import numpy as np
import pytest
import references
from references import HEADS, SIZE, timm_vit, torch

from tests.faults.counts import injected
from vit_jax import load_pretrained
from vit_jax.arrays.pixels import IMAGENET
from vit_jax.errors import UserError
from vit_jax.weights.formats import tensors, timm


def loaded(path, **keys):
  return load_pretrained(path, num_heads=HEADS, **keys)


def test_types_of_8_bits_are_refused(tmp_path):
  """Those of 16 bits are read."""
  save = pytest.importorskip('safetensors.torch').save_file
  state = {k: v.bfloat16() for k, v in timm_vit().state_dict().items()}
  path = str(tmp_path / 'a.safetensors')
  save(state, path)
  kernel = state['head.weight'].float().numpy().T
  np.testing.assert_array_equal(loaded(path)[1]['head']['kernel'], kernel)
  state['head.weight'] = state['head.weight'].to(torch.float8_e4m3fn)
  save(state, path)
  with pytest.raises(UserError, match=r'head.weight \(float8_e4m3fn\)'):
    loaded(path)


@pytest.mark.parametrize(
  'name', ['bfloat16', 'float8_e4m3fn', 'float8_e5m2', 'float8_e4m3fnuz']
)
def test_types_that_numpy_lacks_are_read_exactly(tmp_path, name):
  """Of any shape, also an odd number of values."""
  path, values = str(tmp_path / 'a.pth'), torch.tensor([0.5, -1.75, 96.0])
  low = values.to(getattr(torch, name))
  torch.save({'row': low, 'scalar': low[1], 'empty': low[:0]}, path)
  arrays, _ = tensors.read(path)
  assert {str(array.dtype) for array in arrays.values()} == {name}
  np.testing.assert_array_equal(arrays['row'].astype(float), low.float())
  np.testing.assert_array_equal(arrays['scalar'].astype(float), -1.75)
  assert arrays['empty'].shape == (0,)


def test_a_repeated_name_is_refused(tmp_path):
  """Programs differ in which of the arrays they read."""
  entry = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
  header = f'{{"a":{entry},"a":{entry}}}'.encode()
  path = tmp_path / 'a.safetensors'
  path.write_bytes(struct.pack('<Q', len(header)) + header + bytes(8))
  with pytest.raises(UserError, match='contains a more than once') as error:
    tensors.read(str(path))
  assert str(path) in str(error.value)


def test_tensors_that_only_strides_make_large_are_refused(tmp_path):
  """They would occupy gigabytes of memory as arrays."""
  path = str(tmp_path / 'a.pth')
  torch.save({'head.weight': torch.ones(1).expand(10**5, 10**4)}, path)
  with pytest.raises(UserError, match='describe tensors of 4,000,000,000 byte'):
    tensors.read(path)
  torch.save({'head.weight': torch.ones(1).expand(100, 100)}, path)
  assert tensors.read(path)[0]['head.weight'].shape == (100, 100)


DECODER = ('mask_token', 'decoder_pos_embed', 'decoder_blocks.0.x')


@pytest.mark.parametrize(
  'name, family, other, left_out',
  [
    ('deit_base_patch16_224-b5f2ef4d.pth', 'deit', (), ''),
    ('deit_3_base_224_1k.pth', 'deit3', (), ''),
    ('mae_pretrain_vit_base.pth', 'mae', (), ''),
    ('dino_deitsmall16_pretrain.pth', 'dino', (), ''),
    ('dinov2_vits14_pretrain.pth', 'dinov2', (), ''),
    ('anything.pth', 'vit', (), ''),
    ('a.pth', 'mae', DECODER, "a decoder and its mask token (MAE's), 3"),
    (
      'a.pth',
      'dino',
      ('head.last_layer.weight_g',),
      'parts of DINO or DINOv3, 1',
    ),
  ],
)
def test_file_names_and_arrays_select_the_family(
  tmp_path, caplog, name, family, other, left_out
):
  """Released files do not contain the preprocessing of evaluations."""
  caplog.set_level('INFO', 'vit_jax')
  state = timm_vit(num_classes=0).state_dict()
  state |= {key: torch.zeros(1, 1, 3) for key in other}
  torch.save(state, tmp_path / name)
  description = timm.load(str(tmp_path / name)).description
  assert f'the defaults of the family {family}:' in caplog.text
  assert not left_out or f'left out {left_out}' in caplog.text
  mean, _ = description.statistics
  assert (mean == IMAGENET[0]) == (family != 'vit')


class Evil:
  """An object whose unpickling calls a function."""

  def __reduce__(self):
    return print, ('run!',)


class Own:
  """A class that is not importable elsewhere."""


@pytest.mark.parametrize(
  'content, words',
  [
    ({'model': Evil()}, 'never run'),
    ({'o': np.array([Evil()], dtype=object)}, 'never run'),
    ({'own': Own()}, rf'{__name__}.Own.*safetensors'),
  ],
)
@pytest.mark.parametrize('is_zip', [True, False])
def test_pickled_code_is_not_executed(tmp_path, capsys, content, words, is_zip):
  """PyTorch's advice to load a file unsafely is not repeated."""
  injected('a pickled .pth')
  path = tmp_path / 'a.pth'
  torch.save(content, path, _use_new_zipfile_serialization=is_zip)
  with pytest.raises(UserError, match=words) as error:
    tensors.read(str(path))
  assert not re.search('weights_only|safe_globals|2\\.6', str(error.value))
  assert 'run!' not in capsys.readouterr().out


@pytest.mark.slow
def test_harmless_objects_of_checkpoints_are_read(tmp_path):
  """NumPy's scalars and arrays, paths and arguments, with any usual ending."""
  state = timm_vit().state_dict()
  harmless = {
    'best': np.float64(77.1),
    'flag': np.bool_(True),
    'random': np.random.default_rng(0).normal(size=3),
    'text': np.array(['text'], dtype=object),
    'args': argparse.Namespace(output=pathlib.Path('/x'), lr=np.float32(1)),
  }
  for name in ('a.pth', 'checkpoint.pth.tar', 'last.ckpt', 'a.bin'):
    path = str(tmp_path / name)
    torch.save({'state_dict': state, **harmless}, path)
    params = loaded(path).params
    np.testing.assert_array_equal(
      params['head']['kernel'], state['head.weight'].numpy().T
    )


@pytest.mark.filterwarnings('ignore')  # torch deprecates most of these types
@pytest.mark.parametrize(
  'convert, words',
  [
    (
      lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
      'quint|qint8',
    ),
    (lambda x: x.to_sparse_csr(), 'sparse_csr'),
    (lambda x: x.to('meta'), 'meta'),
    (lambda x: x.to(torch.uint8).view(torch.float4_e2m1fn_x2), 'float4'),
  ],
)
def test_tensors_without_plain_values_are_named(tmp_path, convert, words):
  path = str(tmp_path / 'a.pth')
  torch.save({'some.weight': convert(torch.ones(4, 4))}, path)
  with pytest.raises(UserError, match=rf'some.weight \(.*({words})') as error:
    tensors.read(path)
  assert path in str(error.value)


@pytest.mark.parametrize(
  'content, words',
  [
    (b'', 'is empty'),
    (b'<html>Not found', 'a web page'),
    (b'version https://git-lfs.github.com/spec/v1', 'git lfs pull'),
  ],
)
@pytest.mark.parametrize('ending', ['npz', 'pth', 'safetensors', 'h5', 'npy'])
def test_messages_state_the_kind_of_a_file(tmp_path, ending, content, words):
  """Nothing says that the file is damaged, because nothing was compared."""
  path = tmp_path / f'a.{ending}'
  path.write_bytes(content)
  with pytest.raises(UserError, match=words) as error:
    load_pretrained(str(path))
  assert str(path) in str(error.value)
  assert 'Supported: .npz' in str(error.value)
  assert 'damaged' not in str(error.value)


@pytest.mark.parametrize('ending', ['pth', 'safetensors'])
def test_a_changed_byte_is_detected(tmp_path, ending):
  """PyTorch's archives have checksums, and so have files written here."""
  injected('a flipped bit in weights')
  state = references.state(timm_vit())
  path = tmp_path / f'a.{ending}'
  if ending == 'pth':
    torch.save({k: torch.from_numpy(v) for k, v in state.items()}, path)
  else:
    tensors.write(str(path), state, {'a note': 'text'})
  content, refused = path.read_bytes(), 0
  rng = np.random.default_rng(0)
  for place in rng.choice(len(content), 60, replace=False):
    changed = bytearray(content)
    changed[place] ^= 1 << rng.integers(8)
    path.write_bytes(bytes(changed))
    try:
      found, _ = tensors.read(str(path))
    except UserError as error:
      refused += 1
      assert str(path) in str(error)
      continue
    assert found.keys() == state.keys()  # a byte that is not read
    for name, array in state.items():
      np.testing.assert_array_equal(found[name], array)
  assert refused > 50


@pytest.mark.slow
def test_names_of_original_repositories_are_read(tmp_path):
  """LayerScale of DeiT-III and registers of DINOv2 have other names."""
  reference = timm_vit('deit3_base_patch16_224')
  state = {
    re.sub(r'ls(\d)\.gamma', r'gamma_\1', name): leaf
    for name, leaf in reference.state_dict().items()
  }
  torch.save({'model': state}, tmp_path / 'a.pth')
  path, size = str(tmp_path / 'a.pth'), (SIZE, SIZE)
  keys = dict(num_heads=HEADS)
  references.same_results(path, reference, size, IMAGENET, **keys)
  reference = timm_vit('vit_small_patch14_reg4_dinov2')
  state = reference.state_dict()
  state['register_tokens'] = state.pop('reg_token')
  # The original class token has a position, and timm adds the two.
  place = torch.full_like(state['cls_token'], 0.5)
  state['cls_token'] = state['cls_token'] - place
  state['pos_embed'] = torch.cat([place, state['pos_embed']], dim=1)
  torch.save(state | {'mask_token': place[0]}, path)
  references.same_results(path, reference, size, IMAGENET, **keys)
