"""Tests of XLA's options in plans for GPUs that are not present."""

import dataclasses
import pathlib

from vit_jax.config import loading
from vit_jax.plan import compile, environment, topology

TEXT = (pathlib.Path(__file__).parent / 'small_gpu.hlo').read_text()


def test_a_step_is_compiled_without_kernels_that_need_autotuning(monkeypatch):
  """The options of the user take precedence."""
  compiled = []

  def compile_step(experiment, options, name, cache):
    compiled.append(options)
    return compile.Program(TEXT, None, 1.0)

  monkeypatch.setattr(compile, 'compile_step', compile_step)
  monkeypatch.setattr(environment, 'has_gpu_compiler', lambda: False)
  target = dataclasses.replace(topology.find('h100:2x4'), compiles=True)
  config = loading.load('configs/quickstart.py')
  compile.plan(config, target, {'xla_gpu_autotune_level': '4', 'other': 1})
  assert compiled == [
    {
      'xla_gpu_autotune_level': '4',
      'xla_gpu_enable_triton_gemm': False,
      'other': 1,
    }
  ]
