"""Synthetic data that one process of a run reads slowly."""

import time

import jax

from vit_jax.data.sources import synthetic


class Source(synthetic.Source):
  def __getitem__(self, index):
    if jax.process_index() == 1:
      time.sleep(0.1)
    return super().__getitem__(index)
