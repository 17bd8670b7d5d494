"""Which trained weights a command takes, by flags."""

from absl import flags


def define_flags() -> None:
  """Defines --checkpoint, and --weights among those that it holds."""
  flags.DEFINE_string(
    'checkpoint', None, 'Workdir, checkpoint step directory or weight file.'
  )
  define_choice()


def define_choice() -> None:
  """Defines --weights; see `Pretrained.chosen`."""
  flags.DEFINE_string(
    'weights',
    'params',
    'Which weights of a checkpoint: params, ema (their average), or what its '
    'objective has besides (teacher, say).',
  )
