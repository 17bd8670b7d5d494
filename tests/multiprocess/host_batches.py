"""Saves the rows of some batches that one host of several holds.

python -m tests.multiprocess.host_batches PORT HOSTS HOST START WORKERS OUT
"""

import sys

import jax
import numpy as np

from vit_jax.arrays import sharding
from vit_jax.data.augment.transforms import TrainTransform
from vit_jax.data.pipeline import stream
from vit_jax.data.pipeline.workers import Reader
from vit_jax.data.sources import mixture

BATCH, STEPS, SEED, SKIPPED = 16, 5, 3, (2, 4)


def mixed() -> mixture.Source:
  """Returns a mixture, of which one member has undecodable records."""
  size = dict(num_examples=40, height=9, width=11, num_classes=7)
  return mixture.Source(
    'train',
    members={
      'whole': dict(name='synthetic', weight=0.7, **size),
      'damaged': dict(name='tests.multiprocess.damaged', weight=0.3, **size),
    },
  )


def main(
  port: str,
  hosts: str,
  host: str,
  start: str,
  workers: str,
  out: str,
):
  if int(hosts) > 1:
    jax.distributed.initialize(f'127.0.0.1:{port}', int(hosts), int(host))
  mesh = sharding.make_mesh(jax.devices(), data=4, fsdp=2, model=1)
  reader = Reader(
    processes=int(workers), on_bad_record='skip', max_bad_share=0.5
  )
  held = {}
  with stream.train_batches(
    mixed(),
    TrainTransform((8, 8)),
    BATCH,
    SEED,
    int(start),
    mesh,
    skipped=SKIPPED,
    reader=reader,
  ) as batches:
    for step in range(int(start), STEPS):
      for key, array in next(batches).items():
        for shard in array.addressable_shards:
          rows = shard.index[0]
          held[f'{step} {key} {rows.start} {rows.stop}'] = np.array(shard.data)
  np.savez(out, **held)


if __name__ == '__main__':
  main(*sys.argv[1:])
