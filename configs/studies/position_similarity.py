"""Figure 10: similarity of position embeddings under other hyperparameters.

python -m vit_jax.study --config=configs/studies/position_similarity.py

Three pre-trainings of ViT-L/16 on JFT-300M, with the epochs, the base learning
rate and the weight decay that are printed above the panels of the figure:

| epochs | base lr | weight decay |
| 7      | 2e-4    | 0.01         |
| 7      | 4e-4    | 0.1          |
| 14     | 4e-4    | 0.1          |

The last two are Table 3's row L/16; everything else is the same in all three.
At the end of its training, each row draws the cosine similarity of all pairs of
position embeddings: ROW/pretrain/…/figures/positions.png in the workdir of the
study. For existing weights, `python -m vit_jax.analyze --checkpoint=PATH` draws
the same picture.

Expected: the paper prints no numbers. All three panels are most similar to
their neighbours; how far the similarity reaches depends on the hyperparameters.
JFT-300M is not public: use your own data with --pretrain.source.dataset=… and
--pretrain.train.num_examples=….
"""

from ml_collections import ConfigDict

from vit_jax.config import complete, loading
from vit_jax.sweeps.grid import Row, Stage, Study

_HERE = 'configs/studies/position_similarity.py'
# (epochs, base learning rate, weight decay)
PANELS = ((7, 2e-4, 0.01), (7, 4e-4, 0.1), (14, 4e-4, 0.1))


def get_study() -> Study:
  rows = {}
  for epochs, rate, decay in PANELS:
    flags = {
      'total': f'{epochs} epochs',
      'schedule.base_lr': rate,
      'optimizer.weight_decay': decay,
    }
    name = f'{epochs} epochs, lr {rate:g}, wd {decay:g}'
    rows[name] = Row(pretrain=Stage(_HERE, 'val/accuracy', flags))
  title = 'Figure 10: position embeddings of ViT-L/16'
  note = 'The pictures are ROW/pretrain/…/figures/positions.png.'
  return Study(title=title, rows=rows, note=note)


def get_config() -> ConfigDict:
  """Returns Table 3's pre-training of L/16, which draws figures at its end."""
  config = loading.load('configs/vit.py:variant=L/16,data=jft').to_dict()
  config['evals']['figures'] = dict(name='figures', split='validation')
  return complete(ConfigDict(config))
