"""A synthetic source of which every fifth record cannot be decoded."""

from vit_jax.data.sources import synthetic


class Source(synthetic.Source):
  def __getitem__(self, index):
    example = super().__getitem__(index)
    return example if index % 5 else example | {'image': b'no image'}
