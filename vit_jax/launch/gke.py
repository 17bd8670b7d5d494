"""Target gke: a JobSet, which restarts itself, on TPU slices of GKE.

launch/jobset.template explains the manifest.
"""

import json

from vit_jax.arrays.devices import TPUS
from vit_jax.errors import UserError
from vit_jax.launch.job import GRACE_S, RESUME, STOP, Job, State
from vit_jax.launch.shell import Shell, fill

_SPOT = 'cloud.google.com/gke-spot'


def _literal(text: str) -> str:
  """Escapes text so that Kubernetes does not expand $(VARIABLE) in it."""
  return text.replace('$', '$$')


def _image(job: Job) -> str:
  """Returns the name and tag of the image that contains the commit."""
  return f'{job.image}:{job.commit[:12]}'


def manifest(job: Job) -> str:
  """Returns the manifest of a JobSet: one Job per slice, restarted together."""
  kind, hosts, chips = job.machines
  selector = {
    'cloud.google.com/gke-tpu-accelerator': TPUS[kind].gke,
    'cloud.google.com/gke-tpu-topology': job.topology.partition(':')[2],
  }
  tolerations, environment = [], []
  if job.spot:
    selector[_SPOT] = 'true'
    tolerations = [dict(key=_SPOT, operator='Exists', effect='NoSchedule')]
  if job.data_dir:
    value = _literal(job.data_dir)
    environment = [dict(name='TFDS_DATA_DIR', value=value)]
  trainer = ['python', '-m', 'vit_jax.train', *job.trainer_arguments]
  values = vars(job) | dict(
    hosts=hosts,
    chips=str(chips),
    stop_codes=STOP,
    resume_code=RESUME,
    grace_s=GRACE_S,
    node_selector=selector,
    tolerations=tolerations,
    image=_image(job),
    command=[_literal(word) for word in trainer],
    environment=environment,
  )
  # A value in JSON is also a value in YAML.
  texts = {
    key: json.dumps(value, ensure_ascii=False) for key, value in values.items()
  }
  return fill('jobset.template', **texts)


def state(job: Job, shell: Shell) -> State:
  """Returns the state of the JobSet.

  Raises:
    UserError: the cluster cannot be reached.
  """
  fields = '{.metadata.name}={.status.terminalState}'
  options = ['--ignore-not-found', f'--output=jsonpath={fields}']
  answer = shell.query('kubectl', 'get', 'jobset', job.name, *options)
  if answer is None:
    raise UserError(
      'kubectl cannot reach a cluster with JobSet 0.10 or newer (see above): '
      'select one by `gcloud container clusters get-credentials`.'
    )
  name, _, terminal_state = answer.partition('=')
  if not name:
    return State.ABSENT
  if terminal_state == 'Failed':
    return State.LOST
  # READY also if it has completed: `run` does not start anything.
  shell.note(
    f'already {terminal_state or "running"}; not started a second time'
  )
  return State.READY


def create(job: Job, shell: Shell) -> State:
  """Builds and pushes the image of the commit, and applies the manifest."""
  source = shell.unpack(job.folder, job.commit)
  path = f'{job.folder}/jobset.yaml'
  image = _image(job)
  dockerfile = f'--file={source}/launch/Dockerfile.tpu'
  shell.write(path, manifest(job))
  shell.check('docker', 'build', dockerfile, f'--tag={image}', source)
  shell.check('docker', 'push', image)
  shell.check('kubectl', 'apply', f'--filename={path}', *job.submit_flags)
  return State.READY


def run(job: Job, shell: Shell) -> int:
  """Prints how to follow the JobSet, which the cluster starts and restarts."""
  pods = f'jobset.sigs.k8s.io/jobset-name={job.name}'
  shell.note(
    f'state:  kubectl describe jobset {job.name}\n'
    f'log:    kubectl logs --follow --selector={pods},'
    'batch.kubernetes.io/job-completion-index=0\n'
    'delete: this command with --delete (saves the state; the same command '
    'resumes it)'
  )
  return 0


def delete(job: Job, shell: Shell) -> int:
  """Deletes the JobSet; its trainers save their state."""
  return shell.run('kubectl', 'delete', 'jobset', job.name, '--wait')
