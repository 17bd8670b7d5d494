"""Tests of damaged TFDS shards."""

import pathlib
import shutil

import numpy as np
import pytest
from tfds_twin import open_twin

from tests.faults.counts import further
from vit_jax.data.images.headers import DecodeError
from vit_jax.data.storage import records
from vit_jax.errors import UserError


def flipped(shard, place, bit):
  """Returns the shard's content with one bit flipped."""
  content = bytearray(shard.read_bytes())
  content[place] ^= 1 << bit
  return bytes(content)


def outcome(folder):
  """Returns the examples, None for unreadable ones, or the error on opening."""
  try:
    source = open_twin(folder)
  except UserError as error:
    return str(error)
  examples = []
  for i in range(len(source)):
    try:
      examples.append(source[i])
    except DecodeError:
      examples.append(None)
  return examples


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['array_record', *further('tfrecord')])
def test_no_flipped_bit_changes_an_example(copied, kind):
  """The shard is refused, a record is unreadable, or all are correct.

  (array_record has padding, and headers that are stored more than once.)
  """
  folder, shard = copied(kind)
  whole, content = outcome(folder), shard.read_bytes()
  rng, refused, unreadable = np.random.default_rng(0), 0, 0
  limit = len(content) if kind == 'tfrecord' else 3000
  for _ in range(60):
    place, bit = int(rng.integers(limit)), int(rng.integers(8))
    shard.write_bytes(flipped(shard, place, bit))
    found = outcome(folder)
    shard.write_bytes(content)
    if isinstance(found, str):
      assert str(shard) in found
      refused += 1
      continue
    differ = [a for a, b in zip(found, whole, strict=True) if a != b]
    assert not any(differ), 'an example that is another'
    unreadable += len(differ)
    assert len(differ) <= (1 if kind == 'tfrecord' else 14)
  assert unreadable > 20 and (refused > 1 or kind == 'array_record')


def test_a_bad_checksum_is_a_bad_record(copied):
  """Others are not affected."""
  folder, shard = copied('tfrecord')
  source = open_twin(folder)
  image = source[20]['image']
  place = shard.read_bytes().index(image) + len(image) // 2
  shard.write_bytes(flipped(shard, place, 0))
  damaged = open_twin(folder)
  with pytest.raises(DecodeError, match='CRC-32C does not match'):
    damaged[20]
  assert str(shard) in damaged.where(20)
  assert [damaged[i] == source[i] for i in (18, 19, 21, 22)] == [True] * 4


def test_checksums_equal_tensorflow(prepared):
  """Records of a file written by TFDS, and known values."""
  assert records._masked_crc(b'') == 0xA282EAD8
  # RFC 3720, B.4: CRC-32C of 32 zero bytes is 8A9136AA.
  crc = 0x8A9136AA
  rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
  assert records._masked_crc(bytes(32)) == (rotated + 0xA282EAD8) % 2**32
  source = open_twin(prepared['tfrecord'], 'all')
  assert len([source[i] for i in range(len(source))]) == 47


DAMAGE = {
  'missing': lambda shard: shard.unlink(),
  'empty': lambda shard: shard.write_bytes(b''),
  'cut': lambda shard: shard.write_bytes(shard.read_bytes()[:-1]),
  'half': lambda shard: shard.write_bytes(shard.read_bytes()[:40_000]),
  'zeros': lambda shard: shard.write_bytes(bytes(70_000)),
  'another': lambda shard: shutil.copy(
    str(shard).replace('00001-of', '00000-of'), shard
  ),
}


@pytest.mark.parametrize('damage', DAMAGE)
def test_incomplete_array_record_shards(copied, damage, caplog):
  """They are refused, or left out if they are damaged.

  The message or the log names the shard; other splits can be opened.
  """
  folder, shard = copied('array_record')
  whole = outcome(folder)
  DAMAGE[damage](shard)
  with pytest.raises(UserError, match=f'{shard}.*again'):
    open_twin(folder)
  assert len(open_twin(folder, 'test')) == 7
  if damage in ('missing', 'another'):
    return
  source = open_twin(folder, on_bad_shard='skip')
  found = [source[i] for i in range(len(source))]
  assert found == whole[:13] + whole[27:]
  assert str(shard) in caplog.text
  assert source.where(13).endswith('00002-of-00003, record 0')
  with pytest.raises(UserError, match='array_record-.* cannot be read'):
    open_twin(folder, 'train[14:20]', on_bad_shard='skip')


def test_damage_after_opening_makes_bad_records(copied):
  folder, shard = copied('array_record')
  source = open_twin(folder)
  pathlib.Path(shard).write_bytes(b'')
  with pytest.raises(DecodeError, match='cannot be read'):
    source[20]
  assert source[0]['image'] and source[39]['image']
