"""What XLA is asked for where the layers of a Transformer are unrolled."""

import os
from typing import Any

_DEFAULT_EXCHANGE, _EXCHANGE_A_DEVICE = 120 * 2**20, 128 * 2**10  # bytes


def options(
  unroll: int, platform: str, num_devices: int
) -> dict[str, str | int]:
  """Options for unrolled layers on TPUs, which halve the compile time.

  All unrolled layers have the same code, so it is compiled once and called.
  For that, gradients must be all-reduced in parts that are the same in each
  layer: of 128 KiB per device, large enough that latency is negligible.

  Options that the user has set in $LIBTPU_INIT_ARGS are not overridden.
  """
  if platform != 'tpu' or unroll == 1:
    return {}
  part = min(num_devices * _EXCHANGE_A_DEVICE, _DEFAULT_EXCHANGE)
  chosen: dict[str, Any] = {
    'xla_tpu_enable_deduplicated_calls': 'ENABLED',
    'xla_jf_crs_combiner_threshold_in_bytes': part,
  }
  users = os.environ.get('LIBTPU_INIT_ARGS', '')
  return {k: v for k, v in chosen.items() if k not in users}
