"""Trains a little and prints the host's work as JSON.

  python tests/count_host_work.py CONFIG WORKDIR --config.key=value ...

compiles: number of programs compiled before each step; arrays: dtype and shape
of what was sent to the devices; refused: message for a batch on the host.
"""

import json
import sys
import tempfile

import jax
from etils import epath

from vit_jax.config import loading
from vit_jax.plan.compile import changed
from vit_jax.training import compiling, loop


def main():
  """Counts with JAX's events, and by wrapping two functions."""
  changes = dict(argument.split('=', 1) for argument in sys.argv[2:])
  changes = {key: json.loads(value) for key, value in changes.items()}
  config = changed(loading.load(sys.argv[1]), **changes)
  compiled, compiles, arrays, refused = [], [], [], []

  def listen(event, duration, **_):
    if event.endswith('backend_compile_duration'):
      compiled.append(duration)

  jax.monitoring.register_event_duration_secs_listener(listen)
  to_run, put = compiling.compile_to_run, jax.make_array_from_callback

  def compile_counted_step(experiment):
    step = to_run(experiment)

    def counted(state, batch, *fixed):
      if len(compiles) == 2:
        try:
          step(state, jax.device_get(batch), *fixed)
        except jax.errors.JaxRuntimeError as error:
          refused.append(str(error))
      compiles.append(len(compiled))
      return step(state, batch, *fixed)

    return counted

  def counted_put(shape, sharding, callback):
    arrays.append([str(callback((slice(0, 1),)).dtype), *shape])
    return put(shape, sharding, callback)

  compiling.compile_to_run = compile_counted_step
  jax.make_array_from_callback = counted_put
  with tempfile.TemporaryDirectory() as folder:
    loop.run(config, epath.Path(folder))
  print(
    json.dumps(
      {'compiles': compiles, 'arrays': arrays, 'refused': ' '.join(refused)}
    )
  )


if __name__ == '__main__':
  main()
