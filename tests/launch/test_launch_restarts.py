"""A real run of two workers, preempted and started again by the manifest."""

import jobset_controller
import launch_jobs
import pytest

from tests import runs
from vit_jax.launch import gke, topology

STEPS = 60
CHANGES = {'total': f'{STEPS} steps', 'evals.val.every': '30 steps'}


@pytest.mark.slow
@pytest.mark.long
def test_a_preempted_jobset_ends_with_the_numbers_of_an_undisturbed_run(
  tmp_path,
):
  """SIGTERM to one pod: both save and exit 42, both come back, and finish."""
  for process in runs.start_pair(tmp_path / 'plain', CHANGES, devices=2):
    runs.finish(process)
  changes = runs.SMALL_L16 | CHANGES
  job = launch_jobs.changed(
    'gke',
    workdir=str(tmp_path / 'launched'),
    overrides=tuple(f'--config.{k}={v}' for k, v in changes.items()),
    topology=topology.tpu('v4:2x2x2'),
    slices=1,
    data_dir=None,
    max_restarts=0,  # a preemption is none of them
  )
  assert job.topology.hosts == 2

  def meanwhile(number, pods):
    if number == 0:
      runs.wait_for_step(tmp_path / 'launched', 5, pods)
      jobset_controller.terminate(pods[1])

  controller = jobset_controller.Controller(gke.jobset(job, 300))
  controller.run(meanwhile, devices=2)
  assert controller.history == [
    ([42, 42], 'RestartJobSetAndIgnoreMaxRestarts'),
    ([0, 0], 'Completed'),
  ]
  plain = runs.losses(tmp_path / 'plain')
  launched = runs.losses(tmp_path / 'launched')
  assert list(launched) == list(plain) == list(range(1, STEPS + 1))
  assert launched == plain
