"""Tests that configs of masked pre-training have the papers' numbers."""

import jax
import pytest

from vit_jax.config import loading
from vit_jax.errors import UserError
from vit_jax.models.contract import abstract_params
from vit_jax.optim import optimizers, rules
from vit_jax.training.experiment import Experiment


@pytest.mark.parametrize(
  'model, variant, grid',
  [('B', 'B/16', 14), ('L', 'L/16', 14), ('H', 'H/14', 16)],
)
def test_mae_configs_equal_table_8(model, variant, grid):
  """arXiv 2111.06377; only leaves with more than one dimension decay."""
  config = loading.load(f'configs/mae.py:model={model}')
  assert (config.total, config.batch_size) == ('800 epochs', 4096)
  optimizer, schedule = config.optimizer, config.schedule
  assert (optimizer.b1, optimizer.b2) == (0.9, 0.95)
  assert optimizer.weight_decay == 0.05 and optimizer.clip_norm is None
  assert schedule.base_lr == pytest.approx(2.4e-3)
  assert (schedule.warmup, schedule.end_lr) == ('40 epochs', 0)
  assert schedule.decay == 'cosine'
  augment, mix = config.augment, config.mix
  assert (augment.min_area, augment.max_area) == (0.2, 1)
  assert augment.interpolation == 'bicubic' and augment.flip
  assert not augment.randaugment_layers and not augment.color_jitter
  assert (mix.mixup, mix.cutmix, mix.erasing) == (0, 0, 0)
  assert (config.model.variant, config.model.gelu) == (variant, 'exact')
  assert config.model.norm_eps == 1e-6 and not config.model.dropout
  decoder = config.objective.decoder
  assert (decoder.width, decoder.depth, decoder.num_heads) == (512, 8, 16)
  assert (config.objective.mask_ratio, config.objective.norm_pixels) == (
    0.75,
    True,
  )
  experiment = Experiment.build(config, jax.devices())
  of = experiment.objective
  assert of.grid == (grid, grid) and of.num_visible == grid**2 // 4
  state = experiment.abstract_state()
  table = rules.parse(optimizer.rules)
  found = jax.tree.leaves_with_path(
    rules.apply(table, state.params),
    is_leaf=lambda node: isinstance(node, rules.Rule),
  )
  for path, rule in found:
    last = path[-1].key
    assert last in ('kernel', 'bias', 'scale', 'cls', 'mask')
    assert rule.decay == (last in ('kernel', 'cls', 'mask')), path
  longer = loading.load(f'configs/mae.py:model={model},epochs=1600')
  assert longer.total == '1600 epochs'


@pytest.mark.parametrize(
  'model, variant, epochs, rate, decay, drop_path',
  [
    ('B', 'B/16', 100, 5e-4, 0.65, 0.1),
    ('L', 'L/16', 50, 1e-3, 0.75, 0.2),
    ('H', 'H/14', 50, 1e-3, 0.75, 0.3),
  ],
)
def test_finetune_mae_configs_equal_table_9(
  model, variant, epochs, rate, decay, drop_path
):
  """The rate of every layer is checked."""
  config = loading.load(f'configs/finetune_mae.py:model={model}')
  assert (config.total, config.batch_size) == (f'{epochs} epochs', 1024)
  assert config.schedule.base_lr == pytest.approx(4 * rate)
  assert (config.schedule.warmup, config.schedule.end_lr) == ('5 epochs', 1e-6)
  assert config.optimizer.weight_decay == 0.05
  assert (config.optimizer.b1, config.optimizer.b2) == (0.9, 0.999)
  mix = config.mix
  assert (mix.mixup, mix.cutmix, mix.erasing) == (0.8, 1.0, 0.25)
  assert config.augment.randaugment_magnitude == 9
  assert config.objective.label_smoothing == 0.1
  assert config.model.drop_path == drop_path and config.model.fc_norm
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


@pytest.mark.parametrize('objective', ['mae', 'masked_patch'])
def test_small_self_supervised_configs_build(objective):
  config = loading.load(f'configs/cifar10.py:objective={objective}')
  assert config.num_classes == 0
  assert Experiment.build(config, jax.devices()).total_steps > 0


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


@pytest.mark.parametrize('model, epochs', [('B', 90), ('L', 50), ('H', 50)])
def test_linear_mae_configs_equal_appendix_a1(model, epochs):
  """The linear-probing table of arXiv 2111.06377."""
  config = loading.load(f'configs/linear_mae.py:model={model}')
  assert (config.total, config.batch_size) == (f'{epochs} epochs', 16_384)
  optimizer, schedule = config.optimizer, config.schedule
  assert (optimizer.name, optimizer.momentum) == ('lars', 0.9)
  assert schedule.base_lr == pytest.approx(6.4)
  assert (schedule.warmup, schedule.decay) == ('10 epochs', 'cosine')
  augment, objective = config.augment, config.objective
  assert (augment.crop, augment.min_area) == ('torchvision', 0.08)
  assert augment.flip and augment.interpolation == 'bicubic'
  assert not augment.randaugment_layers and not augment.color_jitter
  assert objective.batch_norm and not objective.patch_mean
  assert (objective.num_classes, objective.last_blocks) == (1_000, 1)
  assert config.num_classes == 0 and config.model.variant is None


@pytest.mark.parametrize(
  'model, last_blocks, patch_mean', [('S', 4, False), ('B', 1, True)]
)
def test_linear_dino_configs_equal_eval_linear(model, last_blocks, patch_mean):
  """The authors' eval_linear.py and their options for S and B."""
  config = loading.load(f'configs/linear_dino.py:model={model}')
  assert (config.total, config.batch_size) == ('100 epochs', 1024)
  optimizer, schedule = config.optimizer, config.schedule
  assert (optimizer.name, optimizer.momentum) == ('sgd', 0.9)
  assert optimizer.weight_decay == 0 and optimizer.clip_norm is None
  assert schedule.base_lr == pytest.approx(0.004)
  assert (schedule.warmup, schedule.decay) == ('0 steps', 'cosine')
  augment, objective = config.augment, config.objective
  assert (augment.crop, augment.min_area) == ('torchvision', 0.08)
  assert augment.flip and augment.interpolation == 'bilinear_antialias'
  assert (objective.last_blocks, objective.patch_mean) == (
    last_blocks,
    patch_mean,
  )
  assert not objective.batch_norm and config.num_classes == 0
