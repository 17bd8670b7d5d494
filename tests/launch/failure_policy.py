"""The actions that Kubernetes and JobSet derive from a manifest.

Written from kubernetes.io, "Pod failure policy", and jobset.sigs.k8s.io,
"Failure policy", for Indexed Jobs with a backoffLimit of 0. These functions
find rules whose order or indices do not match, which a golden file cannot find.
"""

import re

DISRUPTED = 'DisruptionTarget'


def job_failure(spec, failure):
  """Returns (reason, message) of a Job after one of its pods failed.

  Args:
    spec: spec of the Job.
    failure: exit code of the container, or type of a condition of the pod.
  """
  assert spec['backoffLimit'] == 0
  for index, rule in enumerate(spec['podFailurePolicy']['rules']):
    codes = rule.get('onExitCodes')
    types = [c['type'] for c in rule.get('onPodConditions', ())]
    if codes is not None:
      assert codes['operator'] == 'In'
    matches = failure in (codes['values'] if codes else types)
    if matches and rule['action'] == 'FailJob':
      event = f'has condition {failure}'
      if codes:
        event = f'failed with exit code {failure}'
      return (
        'PodFailurePolicy',
        f'… {event} matching FailJob rule at index {index}',
      )
    assert not matches, 'a rule with another action is not supported here'
  return 'BackoffLimitExceeded', 'Job has reached the specified backoff limit'


def action(manifest, failure):
  """Returns the action of the JobSet; the first matching rule applies."""
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
  """Returns an argument of a command after Kubernetes replaced $$ by $.

  No variables are defined, so an expansion $(VARIABLE) is an error.
  """
  assert not re.search(r'(?<!\$)(\$\$)*\$\(', text), text
  return text.replace('$$', '$')
