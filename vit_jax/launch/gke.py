"""Target gke: runs a JobSet, which restarts itself, on TPU slices of GKE.

Fields and values follow the API documentation of Kubernetes (batch/v1 Job, 1.31
or newer), of JobSet (jobset.x-k8s.io/v1alpha2, 0.10 or newer, which can match a
rule of the failure policy against the message of a Job) and of GKE (node labels
for TPUs and spot machines).
"""

import json
from typing import Any

from vit_jax.errors import UserError
from vit_jax.launch import policy
from vit_jax.launch.job import Job
from vit_jax.launch.shell import Shell

_CONTAINER = 'trainer'
_REPLICATED = 'slice'
_SPOT = 'cloud.google.com/gke-spot'


def image_tag(job: Job) -> str:
  """Returns the name and tag of the image that contains the commit."""
  return f'{job.image}:{job.commit[:12]}'


def jobset(job: Job, grace_s: int) -> dict[str, Any]:
  """Returns the manifest of a JobSet: one Job per slice, restarted together.

  Args:
    job: job whose target is GKE.
    grace_s: seconds from SIGTERM to SIGKILL.
  """
  return {
    'apiVersion': 'jobset.x-k8s.io/v1alpha2',
    'kind': 'JobSet',
    'metadata': {
      'name': job.name,
      'labels': {'vit-jax/commit': job.commit},
      # Each slice gets its own node pool, which GKE also needs to connect the
      # slices.
      'annotations': {
        'alpha.jobset.sigs.k8s.io/exclusive-topology': (
          'cloud.google.com/gke-nodepool'
        )
      },
    },
    'spec': {
      'failurePolicy': _failure_policy(job),
      'replicatedJobs': [
        {
          'name': _REPLICATED,
          'replicas': job.slices,
          'template': {'spec': _job(job, grace_s)},
        }
      ],
    },
  }


def _failure_policy(job: Job) -> dict[str, Any]:
  """Returns the actions after the failure of a slice.

  The first matching rule applies. After a failure that matches no rule (a
  crash, a lost peer, lack of memory), the JobSet is restarted, and the restart
  is counted.
  """
  rules = [
    ('stop', 'FailJobSet', 0),
    ('preempted', 'RestartJobSetAndIgnoreMaxRestarts', 1),
    ('disrupted', 'RestartJobSetAndIgnoreMaxRestarts', 2),
  ]
  return {
    'maxRestarts': job.max_restarts,
    'rules': [
      {
        'name': name,
        'action': action,
        'onJobFailureReasons': ['PodFailurePolicy'],
        'onJobFailureMessagePatterns': [f'FailJob rule at index {index}$'],
      }
      for name, action, index in rules
    ],
  }


def _pod_rules() -> list[dict[str, Any]]:
  """Returns the pod rules to which `_failure_policy` refers by index."""

  def on_codes(*codes: int) -> dict[str, Any]:
    values = sorted(codes)
    codes_in = {'operator': 'In', 'values': values}
    return {'containerName': _CONTAINER, **codes_in}

  disrupted = {'type': 'DisruptionTarget', 'status': 'True'}
  return [
    {'action': 'FailJob', 'onExitCodes': on_codes(*policy.STOP)},
    {'action': 'FailJob', 'onExitCodes': on_codes(policy.RESUME)},
    {'action': 'FailJob', 'onPodConditions': [disrupted]},
  ]


def _job(job: Job, grace_s: int) -> dict[str, Any]:
  hosts = job.topology.hosts
  return {
    'parallelism': hosts,
    'completions': hosts,
    'completionMode': 'Indexed',
    # A single pod is never restarted, because it would meet processes of the
    # old run.
    'backoffLimit': 0,
    'podFailurePolicy': {'rules': _pod_rules()},
    'template': {'spec': _pod(job, grace_s)},
  }


def _pod(job: Job, grace_s: int) -> dict[str, Any]:
  assert job.topology.tpu is not None
  chips = {'google.com/tpu': str(job.topology.per_host)}
  selector = {
    'cloud.google.com/gke-tpu-accelerator': job.topology.tpu.gke,
    'cloud.google.com/gke-tpu-topology': job.topology.shape,
  }
  pod: dict[str, Any] = {
    'restartPolicy': 'Never',  # required by podFailurePolicy
    'terminationGracePeriodSeconds': grace_s,
    'nodeSelector': selector,
    'containers': [
      {
        'name': _CONTAINER,
        'image': image_tag(job),
        'command': [
          'python',
          '-m',
          'vit_jax.train',
          *map(_literal, job.trainer_arguments),
        ],
        'env': _environment(job),
        'resources': {'requests': chips, 'limits': chips},
      }
    ],
  }
  if job.service_account:
    pod['serviceAccountName'] = job.service_account
  if job.spot:
    selector[_SPOT] = 'true'
    pod['tolerations'] = [
      {
        **{'key': _SPOT, 'operator': 'Equal', 'value': 'true'},
        'effect': 'NoSchedule',
      }
    ]
  return pod


def _environment(job: Job) -> list[dict[str, str]]:
  if job.data_dir is None:
    return []
  return [{'name': 'TFDS_DATA_DIR', 'value': _literal(job.data_dir)}]


def _literal(text: str) -> str:
  """Returns text in which Kubernetes does not expand $(VARIABLE)."""
  return text.replace('$', '$$')


def start(job: Job, shell: Shell, grace_s: int) -> int:
  """Builds the image of this commit and applies the manifest.

  Args:
    job: job whose target is GKE.
    shell: shell that runs the commands.
    grace_s: seconds from SIGTERM to SIGKILL.

  Returns:
    0; from now on, the cluster starts and restarts the job.
  """
  state = shell.query(
    'kubectl',
    'get',
    'jobset',
    job.name,
    '--ignore-not-found',
    '--output=jsonpath={.metadata.name}={.status.terminalState}',
  )
  if state is None:
    raise UserError(
      'kubectl cannot reach the cluster (see above). Select a cluster with '
      '`gcloud container clusters get-credentials`; it needs JobSet 0.10 or '
      'newer.'
    )
  name, _, end_state = state.partition('=')
  if name and end_state != 'Failed':
    shell.note(f'already {end_state or "running"}; not started a second time')
    return 0
  archive, manifest = f'{job.folder}/code.tar', f'{job.folder}/jobset.json'
  text = json.dumps(jobset(job, grace_s), indent=2, ensure_ascii=False)
  shell.write(manifest, text)
  shell.check(
    'git', 'archive', '--format=tar', f'--output={archive}', job.commit
  )
  file = '--file=launch/Dockerfile.tpu'
  shell.check(
    'docker', 'build', file, f'--tag={image_tag(job)}', '-', stdin=archive
  )
  shell.check('docker', 'push', image_tag(job))
  if name:
    shell.check('kubectl', 'delete', 'jobset', job.name, '--wait')
  shell.check('kubectl', 'apply', f'--filename={manifest}', *job.submit_flags)
  _print_hints(job, shell)
  return 0


def _print_hints(job: Job, shell: Shell) -> None:
  stop = ', '.join(map(str, policy.STOP))
  pods = f'jobset.sigs.k8s.io/jobset-name={job.name}'
  shell.note(
    f'The cluster restarts the job after a preemption or exit code '
    f'{policy.RESUME}; after other\nfailures at most {job.max_restarts} times; '
    f'never after exit code {stop}.\n'
    f'state: kubectl describe jobset {job.name}\n'
    f'log:   kubectl logs --follow --selector={pods},'
    'batch.kubernetes.io/job-completion-index=0\n'
    f'stop:  kubectl delete jobset {job.name}  (saves the state; the same '
    'command resumes it)'
  )
