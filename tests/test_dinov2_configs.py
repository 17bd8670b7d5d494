"""Tests of the configs of DINOv2 against arXiv 2304.07193."""

import jax
import pytest

from vit_jax.config import loading
from vit_jax.training.experiment import Experiment

# patch, steps, batch, group, lr for 1024, warm-up, last decay, layer decay,
# drop path, momentum, local crops, MLP units of L (arXiv 2304.07193)
DINOV2_SHORT = (16, 125_000, 2048, 64, 4e-3, 12_500, 0.4, 0.9, 0.3, 0.992, 96)
DINOV2_LONG = (14, 625_000, 3072, 32, 2e-4, 100_000, 0.2, 1.0, 0.4, 0.994, 98)
DINOV2 = {'short': (*DINOV2_SHORT, 4096), 'long': (*DINOV2_LONG, 2736)}


@pytest.mark.parametrize('model', ['S', 'B', 'L'])
@pytest.mark.parametrize('recipe', DINOV2)
def test_dinov2_configs_equal_the_published_recipes(recipe, model):
  config = loading.load(f'configs/dinov2.py:recipe={recipe},model={model}')
  aims, optimizer, augment = config.objective, config.optimizer, config.augment
  embedding, tokens, layers, last = (rule for _, rule in optimizer.rules)
  depth = len(layers['lr'])
  assert depth == {'S': 12, 'B': 12, 'L': 24}[model]
  decay = layers['lr'][0] ** (1 / depth)
  assert tokens['lr'] == pytest.approx(decay ** (depth + 1))
  assert embedding['lr'] == pytest.approx(0.2 * tokens['lr'])
  assert layers['lr'][-1] == pytest.approx(decay)
  assert last == dict(lr_after='1250 steps')
  experiment = Experiment.build(config, jax.devices()[:1])
  *row, units = DINOV2[recipe]
  assert (
    experiment.model.patch_size,
    experiment.total_steps,
    config.batch_size,
    augment.group,
    pytest.approx(config.schedule.base_lr / (config.batch_size / 1024) ** 0.5),
    int(config.schedule.warmup.split()[0]),
    optimizer.weight_decay_end,
    pytest.approx(decay),
    config.model.drop_path,
    aims.momentum,
    augment.local_size[0],
  ) == tuple(row)
  assert model != 'L' or experiment.model.mlp_dim == units
  assert config.model.drop_path_first == config.model.drop_path
  assert config.model.layer_scale == 1e-5 and config.model.gelu == 'exact'
  assert experiment.model.norm_eps == 1e-6
  assert (optimizer.clip, optimizer.clip_norm) == ('module', 3.0)
  assert (optimizer.b1, optimizer.b2) == (0.9, 0.999)
  assert optimizer.weight_decay == 0.04
  assert augment.global_area == (0.32, 1.0) and augment.local_crops == 8
  assert augment.local_area == (0.05, 0.32)
  assert aims.teacher_temperature == 0.07
  assert aims.temperature_warmup == '37500 steps'
  assert not aims.head.norm_last_layer and aims.koleo == 0.1
  if recipe == 'long':
    heads = [(h.outputs, h.bottleneck) for h in (aims.head, aims.patch_head)]
    assert heads == [(131_072, 384), (131_072, 256)]
    assert aims.centring == 'sinkhorn_knopp'
  else:
    assert (aims.head.outputs, aims.head.bottleneck) == (65_536, 256)
    assert aims.centring == 'centre' and aims.patch_head is None


@pytest.mark.parametrize('recipe, side', [('short', 512), ('long', 518)])
def test_dinov2_at_high_resolution_compresses_the_schedules(recipe, side):
  config = loading.load(f'configs/dinov2.py:recipe={recipe},stage=highres')
  experiment = Experiment.build(config, jax.devices()[:1])
  assert experiment.total_steps == 10_000
  assert experiment.image_size == (side, side)
  full = loading.load(f'configs/dinov2.py:recipe={recipe}')
  for part in (config.schedule.warmup, config.objective.temperature_warmup):
    assert 0 < int(part.split()[0]) <= 3000
  ratio = config.schedule.base_lr / full.schedule.base_lr
  assert ratio == pytest.approx(0.1)
  assert config.init_weights == 'teacher'


@pytest.mark.parametrize('recipe, count', [('short', 4), ('long', 12)])
def test_a_micro_batch_of_eight_gpus_has_a_group_for_each(recipe, count):
  config = loading.load(f'configs/dinov2.py:recipe={recipe},gpu=80')
  assert config.micro_batches == count and config.model.remat == 'dots'
  assert config.batch_size == count * 8 * config.augment.group
