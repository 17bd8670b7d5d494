"""What Kubernetes and JobSet do with a manifest, as their documentation says.

Written from kubernetes.io's "Pod failure policy" and jobset.sigs.k8s.io's
"Failure policy", for Indexed Jobs with a backoffLimit of 0.
"""

import re
import subprocess
import sys

from tests import runs

DISRUPTED = 'DisruptionTarget'


def job_failure(spec, failure):
  """(reason, message) of a Job's condition after one of its pods failed.

  Args:
    spec: of the Job.
    failure: a container's exit code, or the type of a condition of the pod.
  """
  assert spec['backoffLimit'] == 0
  for index, rule in enumerate(spec['podFailurePolicy']['rules']):
    codes = rule.get('onExitCodes')
    types = [c['type'] for c in rule.get('onPodConditions', ())]
    if codes is not None:
      assert codes['operator'] == 'In'
    matches = failure in (codes['values'] if codes else types)
    if matches and rule['action'] == 'FailJob':
      what = f'has condition {failure}'
      if codes:
        what = f'failed with exit code {failure}'
      return (
        'PodFailurePolicy',
        f'… {what} matching FailJob rule at index {index}',
      )
    assert not matches, 'a rule with another action is not known here'
  return 'BackoffLimitExceeded', 'Job has reached the specified backoff limit'


def action(manifest, failure):
  """What happens to the JobSet; the first rule that matches decides."""
  (replicated,) = manifest['spec']['replicatedJobs']
  reason, message = job_failure(replicated['template']['spec'], failure)
  for rule in manifest['spec']['failurePolicy']['rules']:
    reasons = rule.get('onJobFailureReasons', [])
    patterns = rule.get('onJobFailureMessagePatterns', [])
    if reasons and reason not in reasons:
      continue
    if patterns and not any(re.search(p, message) for p in patterns):
      continue
    return rule['action']
  return 'RestartJobSet'


def expanded(text):
  """A string of a command: $$ is $; there is no $(VARIABLE) here."""
  assert not re.search(r'(?<!\$)(\$\$)*\$\(', text), text
  return text.replace('$$', '$')


class Controller:
  """Runs a JobSet's pods as processes of this machine, until it has ended.

  Attributes:
    history: exit codes of all pods, and what followed; an item a try.
    state: 'Completed' or 'Failed'.
  """

  def __init__(self, manifest):
    self.manifest, self.history, self.state = manifest, [], None

  def _pods(self, devices):
    (replicated,) = self.manifest['spec']['replicatedJobs']
    spec = replicated['template']['spec']
    count = replicated['replicas'] * spec['completions']
    (container,) = spec['template']['spec']['containers']
    program, *rest = map(expanded, container['command'])
    assert program == 'python'
    # What GKE's environment variables tell JAX on a TPU.
    port = runs.free_port()
    found = [f'--coordinator_address=127.0.0.1:{port}']
    found += [f'--num_processes={count}']
    return [
      runs.start([sys.executable, *rest, *found, f'--process_id={i}'], devices)
      for i in range(count)
    ]

  def run(self, meanwhile, devices):
    """Starts it, and again as the rules say.

    Args:
      meanwhile: called with the number of the try and its processes.
      devices: of each pod.
    """
    failures = 0
    while self.state is None:
      pods = self._pods(devices)
      try:
        meanwhile(len(self.history), pods)
        errors = [pod.communicate(timeout=300)[1][-2000:] for pod in pods]
      finally:
        for pod in pods:
          if pod.poll() is None:
            pod.kill()
            pod.communicate()
      codes = [pod.returncode for pod in pods]
      if not any(codes):
        self.history.append((codes, 'Completed'))
        self.state = 'Completed'
        return
      then = action(self.manifest, next(filter(None, codes)))
      self.history.append((codes, then))
      failures += then == 'RestartJobSet'
      limit = self.manifest['spec']['failurePolicy']['maxRestarts']
      if then == 'FailJobSet' or failures > limit:
        self.state = 'Failed'
        print(*errors, sep='\n')


def terminate(pod):
  """As the kubelet does at the begin of the grace period."""
  pod.send_signal(subprocess.signal.SIGTERM)
