"""Decides whether a run may resume, by comparing it with its earlier starts.

The module also reads and writes config.json and run.json of a workdir.

A run with another config, other data or other settings of JAX would compute
other numbers, so it is not resumed. The config of the last start is in
config.json. Every checkpoint contains its config and a record of everything
else that its numbers depend on (`record`, in the item `about`). Different
package versions, which usually change only the last bits, are only logged.
A change must be allowed at each start until a checkpoint with it is saved.

Each constructor marks the keys of its section that do not affect the trained
weights (the location of data, the interval between log lines) with
`schema.operational`. These may change. If any other key changes, the config
belongs to another run.
"""

import dataclasses
import json
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from etils import epath

from vit_jax.config import completion, durations, identity
from vit_jax.config.identity import Changes
from vit_jax.config.schema import MARKS, Config
from vit_jax.data import fingerprint as fingerprints
from vit_jax.data.filters import names_differ
from vit_jax.errors import UserError
from vit_jax.files import jsonl, paths
from vit_jax.processes import consensus, runtime, versions
from vit_jax.run import ledger as ledger_lib
from vit_jax.run.ledger import Ledger

log = logging.getLogger('vit_jax')
Json = dict[str, Any]

# Settings of JAX that change initialization, dropout or all matrix products.
_FLAGS = (
  'jax_threefry_partitionable',
  'jax_default_prng_impl',
  'jax_enable_x64',
  'jax_default_matmul_precision',
)
_PACKAGES = (
  'jax',
  'jaxlib',
  'libtpu',
  'flax',
  'optax',
  'numpy',
  'opencv-python-headless',
)
_COMMIT = 'versions: vit_jax'  # key of the commit in `_common_values`
_LENGTH_CHANGES = (
  ' The learning rate depends on the total and changes at the next step, so '
  'the result will differ from that of a run which had this length from the '
  'start.'
)


def default_workdir(config_path: str) -> str:
  """Returns the default workdir of a config.

  Args:
    config_path: path of a config file, optionally with arguments after a colon.

  Returns:
    'runs/<name of the config, with its arguments>'; for a run's config.json,
    the directory of that run.
  """
  folder, _, file = config_path.rpartition('/')
  if file == 'config.json':
    return folder or '.'
  path, _, arg = config_path.partition(':')
  name = pathlib.Path(path).stem
  if arg:
    name += '-' + arg.replace('/', '').replace('=', '_').replace(',', '-')
  return f'runs/{name}'


def last_config(path: epath.Path) -> dict[str, Any] | None:
  """Reads the config of the last start.

  Args:
    path: workdir.

  Returns:
    The config; None if the file is missing or damaged.

  Raises:
    UserError: the file exists, but there is no permission to read it.
    StorageError: the file exists, but cannot be read.
  """
  file = path / 'config.json'
  config = jsonl.parse(jsonl.content(file))
  if config is None and file.exists():
    log.warning(
      '%s is damaged (it is not a JSON object); the config stored in the '
      'checkpoints is compared instead',
      file,
    )
  return config


def record_workdir(
  path: epath.Path, config: Config, run: dict[str, Any]
) -> None:
  """Writes config.json and run.json of a run that has passed all checks.

  Args:
    path: workdir.
    config: completed config.
    run: content of run.json.

  Raises:
    UserError: there is no permission to write the directory.
    StorageError: the storage is full or keeps failing.
  """
  file = path / 'config.json'

  def write() -> None:
    path.mkdir(parents=True, exist_ok=True)
    if file.exists() and jsonl.parse(file.read_bytes()) is None:
      file.rename(path / 'config.json.bad')
    paths.write(file, completion.to_json(config))
    paths.write(path / 'run.json', json.dumps(run, indent=2) + '\n')

  paths.with_retries(write, file, 'written')


def check_workdir(
  workdir: str, config: Config, *, allow_changes: bool
) -> epath.Path:
  """Checks that a workdir is new or belongs to the same run.

  Args:
    workdir: local path, or gs:// address.
    config: completed config.
    allow_changes: whether to resume although the config differs.

  Returns:
    The workdir as a path.

  Raises:
    UserError: config.json belongs to another run, or there is no permission to
      read it.
    UnicodeEncodeError: the path is not UTF-8; see `paths.name_error`.
    StorageError: config.json cannot be read.
  """
  path = paths.locate(workdir)
  # Raises an error if the path is not UTF-8, because checkpoints could not be
  # saved there.
  os.fspath(path).encode()
  last = last_config(path)
  if last and not {'model', 'batch_size', 'total'} & last.keys():
    raise UserError(
      f'the workdir {workdir} contains a config.json that does not belong to a '
      'run of this program: give another --workdir.'
    )
  if last is not None and not allow_changes:
    changes = identity.changes(last, config)
    if changes:
      raise _refusal(workdir, changes)
  return path


def record(fingerprint: Json, frozen: dict[str, str]) -> Json:
  """Returns everything that a run's numbers depend on, except its config.

  Args:
    fingerprint: fingerprint of the training data, see `data.fingerprint`.
    frozen: digests of the frozen models' weights, by name.
  """
  return {
    'fingerprint': fingerprint,
    'frozen': frozen,
    'flags': {name: getattr(jax.config, name, None) for name in _FLAGS},
    'versions': {
      'backend': jax.default_backend(),
      'vit_jax': versions.commit(),
      **{name: versions.package_version(name) for name in _PACKAGES},
    },
  }


def _common_differences(prefix: str, old: Json, new: Json) -> Changes:
  """Returns the differences in the keys that both dicts have."""
  both = old.keys() & new.keys()
  changes = identity.differences(
    {k: old[k] for k in both}, {k: new[k] for k in both}
  )
  return {prefix + key: pair for key, pair in changes.items()}


def check_processes(about: Json, config: Config) -> None:
  """Compares config, data, settings and versions of all processes of a run.

  Two things may differ between machines and are not compared: how data are
  accessed (operational keys of `source` and `reader`), and the commit of
  vit_jax if it is unknown on a process.

  Args:
    about: item `about` that this process would write with a checkpoint.
    config: completed config.

  Raises:
    UserError: on all processes, if one of them differs from process 0.
  """
  if jax.process_count() == 1:
    return
  # Converted to JSON and back, like the values received from process 0.
  local = json.loads(json.dumps(_common_values(about, config)))
  changes = identity.differences(consensus.from_main(lambda: local), local)
  if None in changes.get(_COMMIT, ()):  # the commit is unknown to one of them
    del changes[_COMMIT]
  own = formatted(changes, 'on process 0', f'on process {jax.process_index()}')
  for process, text in enumerate(consensus.gather_text(own)):
    if text:
      raise UserError(
        f'process {process} differs from process 0:{text}\n'
        'Give all processes the same command, code, packages and data.'
      )


def _common_values(about: Json, config: Config) -> Json:
  """Returns a flat dict of the values that must agree on all processes."""
  machine_specific = [
    pattern
    for pattern in identity.operational(config)
    if pattern.startswith(('source.', 'reader.'))
  ]
  values = identity.without(completion.flatten(config), machine_specific)
  for kind, entries in about['record'].items():
    values |= {f'{kind}: {key}': value for key, value in entries.items()}
  return values


class Note(NamedTuple):
  """A change with which a run may resume, for the log and for events.jsonl.

  Attributes:
    kind: kind of the event.
    fields: fields of the event.
    text: message for the log.
  """

  kind: str
  fields: Json
  text: str


def _position(config: Any, step: int) -> str:
  """Returns the position of a step in a training, for the log."""
  size, examples = config['batch_size'], config['train']['num_examples']
  total = durations.Length.of(config).total_steps
  return f'step {step} of {total} (epoch {step * size / examples:.2f})'


def evaluator_notes(last: Json, config: Config, step: int) -> list[Note]:
  """Returns a note for each evaluator whose settings have changed.

  Keys that do not change metrics (operational keys, and when and in which
  batches an evaluator runs), and evaluators of only one config, are left out.

  Args:
    last: config of the last start, as a dict.
    config: completed config of this run.
    step: step that the run starts at.
  """
  notes, old = [], identity.completed(last).get('evals', {})
  # The section of one evaluator, not the dict of all of them.
  mark = dataclasses.replace(MARKS['evals'], many=False)
  for name, section in config.evals.to_dict().items():
    operational = identity.of_section('', mark, section)
    ignored = (
      *(key.removeprefix('.') for key in operational),
      'every',
      'batch_size',
    )
    before, now = (
      identity.without(completion.flatten(entries), ignored)
      for entries in (old.get(name, section), section)
    )
    changes = identity.differences(before, now)
    if not changes:
      continue
    text = (
      f'evals.{name} has other settings than before, so its earlier and later '
      f'metrics {name}/… are not comparable, also not for checkpoint.best. '
      'Give the evaluator another name to distinguish them:'
      + formatted(changes)
    )
    fields = {'step': step, 'name': name, 'changes': changes}
    notes.append(Note('evaluator_change', fields, text))
  return notes


def _refusal(subject: str, changes: Changes) -> UserError:
  """Returns the error for a run that must not resume, with all differences.

  Args:
    subject: workdir or checkpoint that belongs to another run.
    changes: differences from that run.
  """
  return UserError(
    f'{subject} belongs to another run:{formatted(changes)}\nGive another '
    '--workdir, or resume with the change by --allow_config_change.'
    + (_LENGTH_CHANGES if 'total' in changes else '')
  )


def formatted(changes: Changes, old: str = 'before', new: str = 'now') -> str:
  """Formats changes, one per line, with `old` and `new` after the values."""
  lines = []
  for key, (first, second) in changes.items():
    if key.endswith('class_names') and first and second:
      lines.append(f'{key}: {names_differ(first, second)}')
    else:
      lines.append(f'{key}: {_short(first)} {old}, {_short(second)} {new}')
  return ''.join(f'\n  {line}' for line in lines)


def _short(value: Any) -> str:
  """Returns the value for a message, at most 200 characters long."""
  text = repr(value)
  return text if len(text) <= 200 else f'{text[:197]}...'


def may_branch(key: str) -> bool:
  """Returns whether a branch of another run may change a flat key."""
  return key == 'total' or key.startswith('schedule.')


@dataclasses.dataclass
class Comparison:
  """Compares this start of a run with the checkpoint that it resumes from.

  The newest checkpoint is compared first, before anything is compiled. If the
  newest is damaged, the older one that is restored is compared too. All
  processes must call each method, and it returns the same on all of them.

  Attributes:
    workdir: directory of the run.
    current: item `about` of this start.
    config: completed config of this start.
    read_about: function (step) → item `about` of the checkpoint.
    allow_changes: whether to resume although the checkpoint belongs to another
      run.
  """

  workdir: epath.Path
  current: Json
  config: Config
  read_about: Callable[[int], Json]
  allow_changes: bool
  _compared_step: int | None = None
  # Notes that are not yet in the log and in events.jsonl.
  _notes: list[Note] = dataclasses.field(default_factory=list)
  _is_recorded: bool = False  # whether config.json and run.json are written

  def check_newest(self, step: int | None) -> None:
    """Compares all processes, and this start with the newest checkpoint.

    A checkpoint whose item `about` is damaged is not compared, because another
    one may be restored.

    Args:
      step: step of the newest checkpoint; None if there is none.

    Raises:
      UserError: the processes differ, or the checkpoint belongs to another
        run.
    """
    check_processes(self.current, self.config)
    if not step:
      return
    try:
      saved = self.read_about(step)
    except UserError as error:
      log.warning('%s The step that is restored is compared instead.', error)
      return
    self.compare(step, saved)

  def compare(self, step: int, saved: Json) -> None:
    """Compares the item `about` of a checkpoint with that of this start.

    Args:
      step: step of the checkpoint.
      saved: its item `about`. Entries that an older version did not write are
        not compared.

    Raises:
      UserError: config, data or settings differ.
    """
    self._compared_step = step
    old, new = saved['record'], self.current['record']
    fingerprint = old['fingerprint']
    data = fingerprints.comparable(new['fingerprint'], fingerprint)
    changes = identity.changes(saved['config'], self.config)
    changes |= _common_differences('data: ', fingerprint, data)
    for prefix, key in (('weights ', 'frozen'), ('setting ', 'flags')):
      changes |= _common_differences(prefix, old.get(key, {}), new[key])
    events = consensus.from_main(
      lambda: ledger_lib.read(self.workdir / 'events.jsonl')
    )
    if any(e['event'] == 'branch' and e['step'] == step for e in events):
      changes = {k: pair for k, pair in changes.items() if not may_branch(k)}
    if changes and not self.allow_changes:
      checkpoint = f'{self.workdir} (its checkpoint of step {step})'
      raise _refusal(checkpoint, changes)
    if changes:
      text = 'resumed with changes:' + formatted(changes)
      old_position = _position(identity.completed(saved['config']), step)
      position = _position(self.config, step)
      if position != old_position:
        text += f'\n  position: {old_position} before, {position} now'
      fields = {'step': step, 'changes': changes}
      self._notes.append(Note('config_change', fields, text))
    upgrades = _common_differences('', old.get('versions', {}), new['versions'])
    if upgrades:
      text = (
        'versions differ from those that wrote the checkpoint; the numbers may '
        'differ in the last bits from here on, or more if vit_jax itself has '
        'changed:' + formatted(upgrades)
      )
      fields = {'step': step, 'changes': upgrades}
      self._notes.append(Note('versions', fields, text))

  def record_start(
    self, step: int, ledger: Ledger, flops_per_image: float
  ) -> Json:
    """Compares the restored checkpoint, unless already done; records the start.

    It writes config.json, run.json and the notes of the comparisons. A run that
    is refused does not change these files. After a rollback only new notes are
    written.

    Args:
      step: step that the run starts at; 0 for a new run.
      ledger: destination of an event for each note.
      flops_per_image: FLOPs of a training step per image.

    Returns:
      The item `about` of the checkpoint; empty for step 0.

    Raises:
      UserError: the checkpoint belongs to another run, its item `about` is
        damaged, or there is no permission to read it.
      StorageError: the item cannot be read, even after retries.
    """
    saved = self.read_about(step) if step else {}
    if step and step != self._compared_step:
      self.compare(step, saved)
    if not self._is_recorded:
      # The config of the last start must be read before it is replaced.
      last = consensus.from_main(lambda: last_config(self.workdir))
      last = last or saved.get('config', {})
      self._notes += evaluator_notes(last, self.config, step)
      if runtime.is_main():
        run = versions.describe_run() | self.current['record']
        run['train_flops_per_image'] = flops_per_image
        record_workdir(self.workdir, self.config, run)
    if runtime.is_main():
      for note in self._notes:
        log.warning('%s', note.text)
        ledger.event(note.kind, **note.fields)
    self._is_recorded, self._notes = True, []
    return saved
