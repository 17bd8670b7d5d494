"""Classes of pixels: an objective, an evaluator and a config as a plug-in.

The objective trains a linear layer on the patch tokens of any model with the
result 'patches', and the model itself unless it is frozen. The augmentation
`maps` cuts the map of classes like its image.

Try it (less than a minute on two CPU cores, mean IoU above .5; a map of
background has .25):

  python -m vit_jax.train --config=examples/segmentation.py
"""

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from vit_jax.config import complete
from vit_jax.data.augment.maps import IGNORED
from vit_jax.data.contract import require
from vit_jax.errors import check_range
from vit_jax.evaluators import contract
from vit_jax.objectives.contract import AroundModel, Mean
from vit_jax.objectives.mixing import normalize


class Objective(AroundModel):
  """A linear layer on patch tokens; its logits are enlarged to the map.

  Parameters: `model/…` and `head/{kernel,bias}`. `predict` has the further
  result `classes`, logits `[n, rows, columns, k]`. The loss is the mean over
  the pixels that are not ignored, for any number of micro-batches.
  """

  def __init__(self, setting, /, *, classes: int, frozen: bool = False):
    """Returns the objective.

    Args:
      setting: setting of the run.
      classes: number of classes of the pixels, k.
      frozen: whether the model is not trained.
    """
    check_range('objective.classes', classes, at_least=2)
    self.setting, self.classes, self._frozen = setting, classes, frozen

  def check(self, spec):
    require(spec, 'image', 'segments', who='the objective')

  def init(self, key, batch):
    model = self.setting.init_model(key)
    images = self.setting.zero_images()
    width = jax.eval_shape(self._patches, model, images, None).shape[-1]
    kernel = jnp.zeros((width, self.classes))
    head = {'kernel': kernel, 'bias': jnp.zeros(self.classes)}
    return {'model': model, 'head': head}, {}

  def _patches(self, params, images, key):
    variables = {'params': params}
    want = ('patches',)
    return self.setting.model.apply(
      variables, images, key, method='predict', want=want
    )['patches']

  def loss(self, params, inputs):
    model, key = params['model'], inputs.key
    if self._frozen:
      model, key = jax.lax.stop_gradient(model), None
    patches = self._patches(model, normalize(inputs.batch['image']), key)
    target = inputs.batch['segments']
    counted = target != IGNORED
    logits = _logits(params['head'], patches)
    logits = jax.image.resize(logits, (*target.shape, self.classes), 'linear')
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, jnp.where(counted, target, 0)
    )
    count = counted.sum(dtype=jnp.float32)
    correct = ((logits.argmax(-1) == target) & counted).sum(dtype=jnp.float32)
    loss = Mean(jnp.where(counted, losses, 0).sum(), count)
    return loss, ({'pixel_accuracy': Mean(correct, count)}, {})

  @property
  def results(self):
    return (*super().results, 'classes')

  def predict(self, params, batch, want=()):
    others = tuple(name for name in want if name != 'classes')
    if 'classes' not in want:
      return super().predict(params, batch, others)
    found = super().predict(params, batch, (*others, 'patches'))
    return found | {'classes': _logits(params['head'], found['patches'])}


def _logits(head, patches):
  return patches @ head['kernel'] + head['bias']


class Evaluator(contract.Evaluator):
  """Mean intersection over union of the classes, over all pixels of a split."""

  higher_is_better = ('miou',)

  def __init__(self, setting, /, *, split: str, classes: int):
    """Opens the split.

    Args:
      setting: setting of the run.
      split: split of the run's source.
      classes: number of classes of the pixels.
    """
    require(setting.transform.spec, 'segments', who='mean IoU')
    contract.check_results(setting, 'classes', who='mean IoU')
    self._setting, self._classes = setting, classes
    self._source = setting.open_source(split)
    self._pairs = setting.compiled(self._count_pairs)

  def _count_pairs(self, weights, batch):
    logits = self._setting.predict(weights, batch, ('classes',))['classes']
    target, k = batch['segments'], self._classes
    logits = jax.image.resize(logits, (*target.shape, k), 'linear')
    counted = (target != IGNORED) & batch['mask'][:, None, None]
    pair = jnp.where(counted, target * k + logits.argmax(-1), k * k)
    return {'pairs': jnp.bincount(pair.reshape(-1), length=k * k + 1)[:-1]}

  def run(self, weights):
    swept = self._setting.sweep(weights, self._source, self._pairs)
    pairs = contract.total(swept)['pairs'].reshape(self._classes, -1)
    union = pairs.sum(0) + pairs.sum(1) - pairs.diagonal()
    present = union > 0
    return {'miou': float((pairs.diagonal() / union.clip(1))[present].mean())}


def get_config() -> ConfigDict:
  """Returns a config of 150 steps on coloured shapes."""
  config = ConfigDict()
  config.total, config.batch_size = '150 steps', 32
  config.image_size, config.num_classes = (64, 64), 0
  config.source = dict(name='examples.shapes')
  config.train = dict(split='train', num_examples=512)
  maps = dict(name='maps', maps=('segments',))
  config.augment = dict(min_area=0.6, **maps)
  config.preprocess = maps
  config.model = dict(
    name='vit',
    patch_size=8,
    width=64,
    depth=2,
    mlp_dim=128,
    num_heads=2,
    pool='gap',
    dtype='float32',
  )
  config.objective = dict(name='examples.segmentation', classes=3)
  config.optimizer = dict(name='adam', weight_decay=0.03, clip_norm=1.0)
  config.schedule = dict(base_lr=3e-3, decay='cosine', warmup='10 steps')
  miou = dict(name='examples.segmentation', split='test', classes=3)
  config.evals = dict(
    val=dict(every='75 steps', **miou),
    large=dict(every='150 steps', image_size=(96, 96), **miou),
  )
  config.checkpoint = dict(every='75 steps', best='val/miou')
  config.log = dict(every='10 steps')
  return complete(config)
