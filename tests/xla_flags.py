"""XLA's flags of tests, whose programs take longer to compile than to run."""

import importlib.metadata

# Generates code four times as fast. JAX 0.12 has no other way, so it does not
# have the flag either, and unknown flags end the process.
_EMITTERS = '--xla_cpu_use_fusion_emitters=false'


def flags(devices: int, level: int = 0) -> str:
  """Returns the content of XLA_FLAGS.

  Args:
    devices: number of virtual devices of the CPU.
    level: XLA's optimization level of machine code. Where programs are
      inspected, as for TPUs, it is XLA's default of 3.
  """
  found = [
    f'--xla_force_host_platform_device_count={devices}',
    f'--xla_backend_optimization_level={level}',
  ]
  if not level and importlib.metadata.version('jaxlib').startswith('0.10.'):
    found.append(_EMITTERS)
  return ' '.join(found)
