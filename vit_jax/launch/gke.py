"""Target gke: runs a JobSet, which restarts itself, on TPU slices of GKE.

The manifest is launch/jobset.template. Its fields and values follow the API
documentation of Kubernetes (batch/v1 Job, 1.31 or newer), of JobSet
(jobset.x-k8s.io/v1alpha2, 0.10 or newer, which can match a rule of the failure
policy against the message of a Job) and of GKE (node labels for TPUs and spot
machines).

- Each slice gets its own node pool (`exclusive-topology`), which GKE also needs
  to connect the slices.
- A single pod is never restarted (`backoffLimit`), because the other processes
  still belong to the old run. `podFailurePolicy` requires `restartPolicy:
  Never`.
- A rule of `podFailurePolicy` makes a Job fail with a message that contains the
  index of the rule, and the first rule of `failurePolicy` that matches the
  message determines what happens to the JobSet. After a failure that matches no
  rule (a crash, a lost peer, lack of memory), the JobSet is restarted, and the
  restart is counted.
"""

import json
from typing import Any

from vit_jax.errors import UserError
from vit_jax.launch import policy, templates
from vit_jax.launch.job import Job
from vit_jax.launch.shell import Shell

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
  topology = job.topology
  assert topology.tpu is not None
  selector = {
    'cloud.google.com/gke-tpu-accelerator': topology.tpu.gke,
    'cloud.google.com/gke-tpu-topology': topology.shape,
  }
  environment = []
  if job.data_dir is not None:
    value = _literal(job.data_dir)
    environment.append({'name': 'TFDS_DATA_DIR', 'value': value})
  options: dict[str, Any] = {}
  if job.service_account:
    options['serviceAccountName'] = job.service_account
  if job.spot:
    selector[_SPOT] = 'true'
    options['tolerations'] = [
      {
        'key': _SPOT,
        'operator': 'Equal',
        'value': 'true',
        'effect': 'NoSchedule',
      }
    ]
  trainer = ['python', '-m', 'vit_jax.train', *job.trainer_arguments]
  values = dict(
    name=job.name,
    commit=job.commit,
    max_restarts=job.max_restarts,
    slices=job.slices,
    hosts=topology.hosts,
    stop_codes=sorted(policy.STOP),
    resume_codes=[policy.RESUME],
    grace_s=grace_s,
    node_selector=selector,
    image=image_tag(job),
    command=[_literal(word) for word in trainer],
    environment=environment,
    chips={'google.com/tpu': str(topology.per_host)},
  )
  text = templates.fill(
    'jobset.template',
    **{key: json.dumps(value) for key, value in values.items()},
  )
  manifest = json.loads(text)
  slice_job = manifest['spec']['replicatedJobs'][0]['template']['spec']
  slice_job['template']['spec'] |= options
  return manifest


def _literal(text: str) -> str:
  """Escapes text so that Kubernetes does not expand $(VARIABLE) in it."""
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
