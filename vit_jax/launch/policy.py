"""What follows from the exit code of a trainer; one rule for all targets."""

import time
from collections.abc import Callable

from vit_jax.errors import (
  EXIT_DIVERGED,
  EXIT_PREEMPTED,
  EXIT_USER_ERROR,
)

# Starting again would end the same way, or hide what a person should see.
STOP = {
  EXIT_USER_ERROR: 'an error of the user, said above',
  EXIT_DIVERGED: 'diverged: rolling back did not help',
}
# Started again without being counted: the state is saved. All other codes (a
# crash, storage, a stuck or lost process, a lost connection) are counted. A
# hang is usually one of the network or of a host, so it is started again, too.
RESUME = EXIT_PREEMPTED
PAUSE_S = 60


def until_done(
  attempt: Callable[[], int],
  max_restarts: int,
  say: Callable[[str], None],
  pause: Callable[[float], None] = time.sleep,
) -> int:
  """Tries until the run is finished, or a person has to look at it.

  Args:
    attempt: starts or resumes the run, waits for its end; returns its code.
    max_restarts: after failures; those after a preemption are not counted.
    say: gets a line after each try.
    pause: waits for some seconds before the next.

  Returns:
    The exit code of the last try.
  """
  failures = 0
  while True:
    code = attempt()
    if code == 0:
      say('finished')
      return code
    if code in STOP:
      say(f'exit code {code}: {STOP[code]}; not started again')
      return code
    if code == RESUME:
      say('preempted, state saved; starting again')
    elif failures < max_restarts:
      failures += 1
      say(f'exit code {code}; starting again ({failures} of {max_restarts})')
    else:
      say(f'exit code {code} after {failures} restarts; given up')
      return code
    pause(PAUSE_S)
