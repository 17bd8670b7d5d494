"""JSON schema of the fields of a JobSet that a launch may write.

From the public API references: kubernetes.io (batch/v1 Job, core/v1 PodSpec),
jobset.sigs.k8s.io (jobset.x-k8s.io/v1alpha2). Unknown fields and values are
errors, as they are for `kubectl apply`; a golden file would record a misspelt
field as correct, and covers only one job.
"""

_NAME = {'type': 'string', 'pattern': r'^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$'}
_STRING = {'type': 'string'}
_COUNT = {'type': 'integer', 'minimum': 0}
_QUANTITIES = {
  'type': 'object',
  'values': {'type': 'string', 'pattern': r'^\d+$'},
}
_STRINGS = {'type': 'array', 'items': _STRING}


def _object(required='', **properties):
  return {
    'type': 'object',
    'required': required.split(),
    'properties': properties,
  }


def _list(items):
  return {'type': 'array', 'items': items}


def _one_of(*values):
  return {'type': 'string', 'enum': values}


_TOLERATION = _object(
  'key',
  key=_STRING,
  operator=_one_of('Exists', 'Equal'),
  value=_STRING,
  effect=_one_of('NoSchedule', 'PreferNoSchedule', 'NoExecute'),
)
_CONTAINER = _object(
  'name image',
  name=_NAME,
  image={'type': 'string', 'pattern': r'^[a-z0-9./_-]+:[\w.-]{1,128}$'},
  command=_STRINGS,
  env=_list(_object('name', name=_STRING, value=_STRING)),
  resources=_object(requests=_QUANTITIES, limits=_QUANTITIES),
)
_POD = _object(
  'containers restartPolicy',
  restartPolicy=_one_of('Never'),  # required by podFailurePolicy
  terminationGracePeriodSeconds=_COUNT,
  serviceAccountName=_NAME,
  nodeSelector={'type': 'object', 'values': _STRING},
  tolerations=_list(_TOLERATION),
  containers=_list(_CONTAINER),
)
_POD_RULE = _object(
  'action',
  action=_one_of('FailJob', 'FailIndex', 'Ignore', 'Count'),
  onExitCodes=_object(
    'operator values',
    containerName=_NAME,
    operator=_one_of('In', 'NotIn'),
    values=_list({'type': 'integer', 'minimum': 1, 'maximum': 255}),
  ),
  onPodConditions=_list(
    _object('type', type=_STRING, status=_one_of('True', 'False', 'Unknown'))
  ),
)
_JOB = _object(
  'template',
  parallelism=_COUNT,
  completions=_COUNT,
  completionMode=_one_of('Indexed', 'NonIndexed'),
  backoffLimit=_COUNT,
  podFailurePolicy=_object('rules', rules=_list(_POD_RULE)),
  template=_object('spec', spec=_POD),
)
_RULE = _object(
  'name action',
  name={'type': 'string', 'pattern': r'^[A-Za-z]([\w,:-]{0,126}[\w])?$'},
  action=_one_of(
    'FailJobSet', 'RestartJobSet', 'RestartJobSetAndIgnoreMaxRestarts'
  ),
  onJobFailureReasons=_list(
    _one_of(
      'BackoffLimitExceeded',
      'DeadlineExceeded',
      'FailedIndexes',
      'MaxFailedIndexesExceeded',
      'PodFailurePolicy',
    )
  ),
  onJobFailureMessagePatterns=_STRINGS,
)
JOBSET = _object(
  'apiVersion kind metadata spec',
  apiVersion=_one_of('jobset.x-k8s.io/v1alpha2'),
  kind=_one_of('JobSet'),
  metadata=_object(
    'name',
    name=_NAME,
    labels={
      'type': 'object',
      'values': {'type': 'string', 'pattern': r'^[\w.-]{1,63}$'},
    },
    annotations={'type': 'object', 'values': _STRING},
  ),
  spec=_object(
    'replicatedJobs',
    failurePolicy=_object(
      'maxRestarts', maxRestarts=_COUNT, rules=_list(_RULE)
    ),
    replicatedJobs=_list(
      _object(
        'name template',
        name=_NAME,
        replicas=_COUNT,
        template=_object('spec', spec=_JOB),
      )
    ),
  ),
)
