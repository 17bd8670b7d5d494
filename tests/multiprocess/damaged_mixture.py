"""A mixture whose small member has bad records: 0 and 5 of its 10."""

from vit_jax.data.sources import mixture


class Source(mixture.Source):
  def __init__(self, split, /):
    sizes = dict(height=8, num_classes=20, weight=1.0)
    super().__init__(
      split,
      members=dict(
        large=dict(name='synthetic', num_examples=490, **sizes),
        small=dict(name='tests.multiprocess.damaged', num_examples=10, **sizes),
      ),
    )
