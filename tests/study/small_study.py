"""A study of two small models on digits."""

from vit_jax.sweeps.grid import Evaluation, Row, Stage, Study

_QUIET = {
  'log.every': '1 steps',
  'log.tensorboard': 'false',
  'log.curves': 'false',
  'log.report': 'false',
  'checkpoint.every': '4 steps',
}
_SIZES = {
  'model.width': 16,
  'model.mlp_dim': 16,
  'model.num_heads': 2,
  'model.dropout': 0.0,
}
_FEW = {'evals.fewshot.train_split': 'train', 'evals.fewshot.shots': '(1,5)'}


def get_study() -> Study:
  few = Evaluation('fewshot', '5shot', 'test', flags=_FEW)
  rows = {}
  for depth in (1, 2):
    flags = {
      'total': '24 steps',
      'batch_size': 16,
      'model.depth': depth,
      'schedule.warmup': '1 steps',
      'evals.test.every': '24 steps',
    }
    rows[f'depth {depth}'] = Row(
      pretrain=Stage(
        'configs/quickstart.py', 'test/accuracy', flags | _SIZES | _QUIET
      ),
      transfers={'1-shot': few._replace(metric='1shot'), '5-shot': few},
    )
  return Study(title='Digits', rows=rows)
