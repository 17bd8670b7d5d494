"""Tests of LoRA against gradients of whole matrices and against `peft`."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from minimal_config import completed
from tiny_vit import SIZES, noise_params

from tests import cli
from tests.faults.counts import further, slow
from tests.objectives.tiny import KEY, inputs, labelled, noisy
from vit_jax.arrays import tree
from vit_jax.checkpoint import manifest
from vit_jax.errors import UserError
from vit_jax.models import layers, swin
from vit_jax.models.vit import Model
from vit_jax.objectives import dino, supervised
from vit_jax.objectives.contract import Frozen, Setting
from vit_jax.objectives.lora import Lora, adapted
from vit_jax.training.experiment import Experiment
from vit_jax.weights import pretrained

CLASSES, SIZE = 7, (8, 8)
LINEAR = ('query', 'key', 'value', 'out', 'fc1', 'fc2')
MODELS = {
  'vit': Model(CLASSES, **SIZES),
  'swin': swin.Model(
    CLASSES, width=16, depths=(2,), num_heads=2, window_size=2, dtype='float32'
  ),
}


BATCH = labelled(6, SIZE, CLASSES)


def objectives(kind, **keys):
  """Returns an objective without and with LoRA."""
  model = MODELS[kind]
  plain = supervised.Objective(Setting(model, SIZE))
  base = Frozen(model, SIZE, lambda mesh: None, without=model.fresh)
  return plain, adapted(plain, Lora(**{'rank': 2} | keys), base)


def split(kind, of):
  """Returns random trained parameters, and frozen ones."""
  base = noise_params(MODELS[kind], SIZE)
  head = base.pop('head')
  return {'head': head, 'lora': noisy(of, seed=0)['lora']}, {'base': base}


def loss_of(of, frozen):
  """Returns the loss as a function of trained parameters."""
  return lambda trained: of.loss(trained, inputs(BATCH, frozen=frozen))[0]


@pytest.mark.parametrize('kind', MODELS)
def test_gradients_follow_from_those_of_the_matrices(kind):
  """With W' = W + s A B, they are s dW' Bᵀ and s Aᵀ dW', layer by layer.

  The gradient of a bias is that of the whole bias.
  """
  plain, of = objectives(kind, alpha=3.0, targets=LINEAR, bias='all')
  trained, frozen = split(kind, of)
  whole = of.whole(trained, frozen)
  dense = jax.jit(jax.grad(loss_of(plain, {})))(whole)
  found = jax.jit(jax.grad(loss_of(of, frozen)))(trained)
  dense, lora = tree.flatten(dense), tree.flatten(trained['lora'])
  assert found['head'].keys() == {'kernel', 'bias'}
  np.testing.assert_allclose(
    found['head']['kernel'], dense['head/kernel'], atol=1e-6
  )
  count = 0
  for path, gradient in tree.flatten(found['lora']).items():
    layer, _, name = path.rpartition('/')
    if name == 'bias':
      np.testing.assert_allclose(gradient, dense[path], atol=1e-5)
      continue
    count += 1
    a, b = np.float64(lora[f'{layer}/a']), np.float64(lora[f'{layer}/b'])
    slope = np.float64(dense[f'{layer}/kernel'])
    slope = slope.reshape(len(a), a.shape[1], b.shape[2])
    expected = {
      'a': 1.5 * np.einsum('lio,lro->lir', slope, b),
      'b': 1.5 * np.einsum('lir,lio->lro', a, slope),
    }
    assert np.abs(expected[name]).max() > 1e-4
    np.testing.assert_allclose(gradient, expected[name], atol=1e-5)
  assert count == 2 * len(LINEAR) * (2 if kind == 'swin' else 1)


@pytest.mark.parametrize('kind', [*slow('vit'), *further('swin')])
def test_dropout_is_that_of_the_inputs_of_a(kind):
  """With a rate of almost 0, A B acts as in the merged matrices.

  Predictions have no dropout.
  """
  keys = dict(alpha=3.0, targets=LINEAR, bias='all')
  found = []
  for rate in (0.0, 1e-9, 0.5):
    _, of = objectives(kind, **keys, dropout=rate)
    trained, frozen = split(kind, of)
    loss, grads = jax.jit(jax.value_and_grad(loss_of(of, frozen)))(trained)
    logits = of.predict(of.whole(trained, frozen), BATCH)['logits']
    found.append((loss, grads, logits))
  exact, almost, half = found
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), exact, almost
  )
  assert abs(half[0] - exact[0]) > 1e-3
  np.testing.assert_array_equal(half[2], exact[2])


def test_dropout_leaves_the_mean_of_the_product_and_the_matrix_unchanged():
  """The mask is that of the inputs: it is the same for all outputs."""
  layer, x = layers.Linear((4,)), jnp.array([[1.0, 2.0, -1.0]])
  kernel, b = jnp.ones((3, 4)), jnp.arange(8.0).reshape(2, 4)
  own = {'kernel': kernel, 'bias': jnp.ones(4), 'a': jnp.eye(3, 2), 'b': b}

  @jax.vmap
  def of(key):
    with layers.low_rank(0.25, 0.5):
      return layer.apply({'params': own | {'key': key}}, x)[0]

  found = np.asarray(of(jax.random.split(KEY, 4000)))
  possible = [
    3 + 0.5 * (i * b[0] + j * 2 * b[1]) for i in (0, 4 / 3) for j in (0, 4 / 3)
  ]
  distances = [np.abs(found - each).max(-1) for each in possible]
  counts = np.bincount(np.argmin(distances, 0))
  assert np.min(distances, 0).max() < 1e-5
  np.testing.assert_allclose(
    counts / 4000, [1 / 16, 3 / 16, 3 / 16, 9 / 16], atol=0.03
  )
  np.testing.assert_allclose(
    found.mean(0), 3 + x[0] @ own['a'] @ b / 2, atol=0.1
  )


@pytest.mark.parametrize('kind', ['vit', *slow('swin')])
def test_training_starts_from_the_frozen_model(kind):
  """B is zero, and A is uniform in ±1 / √inputs."""
  plain, of = objectives(kind)
  trained, extra = jax.jit(of.init)(KEY, None)
  assert extra == {} and trained.keys() == {'head', 'lora'}
  _, frozen = split(kind, of)
  started = of.whole(trained, frozen)
  for path, leaf in tree.flatten(frozen['base']).items():
    np.testing.assert_array_equal(tree.flatten(started)[path], leaf, path)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
    started['head'],
    plain.init(KEY, None)[0]['head'],
  )
  lora = tree.flatten(trained['lora'])
  assert {path.rpartition('/')[2] for path in lora} == {'a', 'b'}
  assert all('query' in path or 'value' in path for path in lora)
  for path, leaf in lora.items():
    if path.endswith('/a'):
      limit = leaf.shape[1] ** -0.5
      assert 0.8 * limit < np.abs(leaf).max() <= limit
    else:
      assert not np.any(leaf)


def test_layers_above_are_those_of_the_matrices():
  plain, of = objectives('vit')
  path = 'encoder/layers/attention/query'
  assert of.layers_above(f'lora/{path}/a') == (3, 2, 1)
  assert of.layers_above('head/kernel') == plain.layers_above('head/kernel')


@pytest.mark.parametrize(
  'keys, expected',
  [
    (dict(rank=-1), 'lora.rank.*-1'),
    (dict(rank=16), 'lora.rank is 16.*query.*16 x 16.*below 16'),
    (dict(alpha=0.0), 'lora.alpha'),
    (dict(bias='some'), 'lora.bias.*some'),
    (dict(dropout=1.0), 'lora.dropout.*1.0'),
    (dict(targets=()), 'lora.targets.*encoder/layers/attention/query'),
    (dict(targets=('fc1', 'q_proj')), r'q_proj.*encoder/layers/mlp/fc2'),
    (dict(targets=('uery',)), 'uery'),  # not a whole part of a path
    (dict(targets=('embedding',)), 'embedding'),  # not in the layers
  ],
)
def test_ranks_and_targets_without_a_sense_are_refused(keys, expected):
  with pytest.raises(UserError, match=expected):
    _, of = objectives('vit', **keys)
    jax.eval_shape(of.init, KEY, None)


def test_objectives_that_do_not_train_the_model_as_it_is_are_refused():
  """They have a teacher that follows it, or it is frozen anyway."""
  model = Model(0, **SIZES)
  base = Frozen(model, SIZE, lambda mesh: None, without=model.fresh)
  teaching = dino.Objective(Setting(model, SIZE))
  with pytest.raises(UserError, match='lora.rank is 2.*dino.*teacher'):
    adapted(teaching, Lora(rank=2), base)
  frozen = dict(name='segment', classes=3)
  section = {'objective': frozen, 'lora.rank': 2, 'num_classes': 0}
  with pytest.raises(UserError, match='lora.rank is 2.*segment.*frozen'):
    Experiment.build(completed(**section), jax.devices()[:1])


def test_flops_of_a_step_leave_out_gradients_of_frozen_matrices():
  """They are those of `key`, `out` and the MLP; A B is computed per batch."""

  def flops_of(rank):
    config = completed(**{'lora.rank': rank, 'model.dtype': 'float32'})
    return Experiment.build(config, jax.devices()[:1]).image_flops

  patches, width, rank, depth, batch = 4, 8, 2, 2, 8
  tokens = patches + 1
  embedding = 2 * patches * 3 * 4**2 * width  # twice: no backward pass at all
  frozen = depth * 2 * tokens * 4 * width**2  # the MLP has `width` units
  products = depth * 2 * 2 * rank * width**2 / batch  # of query and value
  expected = flops_of(0) - 2 * embedding - frozen + 3 * products
  assert flops_of(rank) == expected


# Runs

RUN = cli.QUIET | {
  'source.name': 'synthetic',
  'source.num_examples': 64,
  'source.num_classes': 5,
  'train.num_examples': 64,
  'num_classes': 5,
  'image_size': 48,  # positions of the base are interpolated
  'batch_size': 16,
  'total': '6 steps',
  'schedule.warmup': '2 steps',
  'model.dtype': 'float32',
  'model.unroll': 1,
  'average_decay': 0.5,
  'checkpoint.every': '2 steps',
  'checkpoint.keep': 9,
  'evals.val.every': '3 steps',
  'lora.rank': 3,
  'lora.dropout': 0.3,
}


def tune(base, workdir, **changes):
  values = RUN | {'init_from': base} | changes
  config = 'configs/finetune_imagenet.py'
  return cli.command('finetune', *cli.flags(config, workdir, values))


@pytest.mark.long
def test_a_run_resumes_exactly_and_is_used_like_any_other(tmp_path):
  """Its checkpoint contains a checksum of the frozen weights, not the weights.

  A killed run is one that stops at step 4.
  """
  base, workdir = tmp_path / 'base', tmp_path / 'run'
  shutil.copytree(cli.reference(total='12 steps'), base)
  again = tmp_path / 'again'
  cli.run(tune(base, workdir))
  shutil.copytree(workdir, again)
  for step in (4, 6):
    shutil.rmtree(again / f'checkpoints/{step}')
  cli.remove_finished_event(again)
  cli.run(tune(base, again))
  assert cli.losses(workdir) == cli.losses(again)
  assert cli.lines(workdir) == cli.lines(again)
  leaves = manifest.read(epath.Path(workdir) / 'checkpoints/6').leaves
  params = {path for path in leaves if path.startswith('params/')}
  lora = 'params/lora/encoder/layers/attention'
  trained = {f'{lora}/{x}/{ab}' for x in ('query', 'value') for ab in 'ab'}
  assert params == trained | {'params/head/kernel', 'params/head/bias'}
  found, same = cli.final_params(workdir), cli.final_params(again)
  started = cli.final_params(base)
  for path, leaf in found.items():
    np.testing.assert_array_equal(leaf, same[path], path)
    changed = 'attention/query/k' in path or 'attention/value/k' in path
    if path.startswith('encoder'):
      assert np.array_equal(leaf, started[path]) != changed, path
  # Evaluation in the run and from the checkpoint agree.
  last = cli.records(workdir)[-1]
  out, _ = cli.run(cli.command('evaluate', f'--checkpoint={workdir}', '--json'))
  assert f'"accuracy": {last["val/accuracy"]}' in out
  merged = pretrained.find(str(workdir)).description
  assert merged.config['lora']['rank'] == 0
  # Without its last step, the base has other weights.
  shutil.rmtree(base / 'checkpoints/12')
  with pytest.raises(UserError, match=f'{base}.*changed.*checksum'):
    cli.final_params(workdir)
  shutil.rmtree(again / 'checkpoints/6')
  cli.remove_finished_event(again)
  _, err = cli.run(tune(base, again), code=2)
  assert 'weights base' in err, err
  shutil.rmtree(base)
  with pytest.raises(UserError, match=f'LoRA needs.*{base}.*does not exist'):
    cli.final_params(workdir)
