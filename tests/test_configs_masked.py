"""Tests of configs of masked pre-training: rules, sizes and messages."""

import jax
import pytest

from vit_jax.config import loading
from vit_jax.errors import UserError
from vit_jax.models.contract import abstract_params
from vit_jax.optim import optimizers, rules
from vit_jax.training.experiment import Experiment


@pytest.mark.parametrize('model, grid', [('B', 14), ('L', 14), ('H', 16)])
def test_mae_hides_three_quarters(model, grid):
  """Only leaves with more than one dimension decay."""
  config = loading.load(f'configs/mae.py:model={model}')
  experiment = Experiment.build(config, jax.devices())
  of = experiment.objective
  assert of.grid == (grid, grid) and of.num_visible == grid**2 // 4
  state = experiment.abstract_state()
  table = rules.parse(config.optimizer.rules)
  found = jax.tree.leaves_with_path(
    rules.apply(table, state.params),
    is_leaf=lambda node: isinstance(node, rules.Rule),
  )
  for path, rule in found:
    last = path[-1].key
    assert last in ('kernel', 'bias', 'scale', 'cls', 'mask')
    assert rule.decay == (last in ('kernel', 'cls', 'mask')), path


@pytest.mark.parametrize(
  'model, variant, decay',
  [('B', 'B/16', 0.65), ('L', 'L/16', 0.75), ('H', 'H/14', 0.75)],
)
def test_rates_of_layers_after_mae(model, variant, decay):
  """They decrease from the head to the embedding, as in Table 9."""
  config = loading.load(f'configs/finetune_mae.py:model={model}')
  assert config.model.variant is None  # read from the weights
  with config.unlocked():
    config.model.variant = variant
  of = Experiment.build(config, jax.devices())
  params = abstract_params(of.model, (224, 224))
  found = rules.apply(rules.parse(config.optimizer.rules), params)
  depth = len(found['encoder']['layers']['norm1']['scale'].lr)
  # The authors' ids: 0 before the blocks, i + 1 of block i, the rest the last.
  scales = [decay ** (depth + 1 - i) for i in range(depth + 2)]
  assert found['embedding']['kernel'] == rules.Rule(lr=scales[0])
  for part in (found['cls'], found['position']['embedding']):
    assert part == rules.Rule(lr=scales[0], decay=0.0)
  layers = found['encoder']['layers']
  for part, decays in (('kernel', 1.0), ('bias', 0.0)):
    rule = layers['mlp']['fc1'][part]
    assert rule.lr == pytest.approx(scales[1:-1]) and rule.decay == decays
  assert found['head']['kernel'] == rules.Rule()
  assert found['fc_norm']['scale'] == rules.Rule(decay=0.0)
  assert depth == of.model.depth
  optimizers.adam(lambda _: 0.1, rules=config.optimizer.rules)


def test_masked_patch_config_equals_appendix_b12():
  """Appendix B.1.2 of arXiv 2010.11929."""
  config = loading.load('configs/masked_patch.py')
  assert (config.total, config.batch_size) == ('1000000 steps', 4096)
  assert 13 < 1e6 * 4096 / config.train.num_examples < 14.5
  assert config.model.variant == 'B/16' and config.num_classes == 0
  schedule = config.schedule
  assert (schedule.base_lr, schedule.warmup) == (2e-4, '10000 steps')
  assert schedule.decay == 'cosine' and config.objective.corrupted == 0.5
  assert config.objective.target == 'mean_color'
  public = loading.load('configs/masked_patch.py:data=i21k,target=pixels')
  assert public.source.dataset == 'imagenet21k'
  assert public.objective.target == 'pixels'


def test_messages_of_wrong_arguments():
  for argument, words in (
    ('mae.py:model=S', 'not a row of the paper'),
    ('mae.py:epochs=300', 'for 800 or 1600'),
    ('finetune_mae.py:model=S', 'not a row of the paper'),
    ('linear_mae.py:model=S', 'model=S'),
    ('linear_dino.py:model=L', 'model=L'),
    ('masked_patch.py:data=i1k', "did you mean 'i21k'|allowed"),
    ('cifar10.py:objective=made', "did you mean 'mae'"),
  ):
    with pytest.raises(UserError, match=words):
      loading.load(f'configs/{argument}')
