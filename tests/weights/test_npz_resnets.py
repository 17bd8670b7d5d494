"""Tests of official files of BiT's ResNets and hybrids with timm's loaders.

timm reads the written files by its own tables; its results must equal ours
stage by stage. timm's layers get the official constants.
"""

import functools

import jax
import minimal_config
import numpy as np
import pytest
from references import noisy, same_results, timm, torch
from timm.layers import GroupNormAct, StdConv2d, StdConv2dSame
from timm.models import resnetv2, vision_transformer
from timm.models.vision_transformer_hybrid import HybridEmbed
from tiny_vit import images_of, noise_params

from tests.faults.counts import further
from vit_jax import load_pretrained
from vit_jax.config import loading
from vit_jax.errors import UserError
from vit_jax.models import resnet, vit
from vit_jax.training.experiment import Experiment
from vit_jax.weights import architecture, pretrained, transfer
from vit_jax.weights.formats import npz

SIZES = dict(width=64, depth=2, mlp_dim=96, num_heads=4, dtype='float32')
PREFIX = 'resnet/'


class _ByDeviation(StdConv2dSame):
  """Adds ε to the standard deviation, as the hybrids' official code does."""

  def forward(self, x):
    # The reference sums in float64, so that its rounding does not matter.
    weight = self.weight.double()
    axes = (1, 2, 3)
    deviation, mean = torch.std_mean(weight, axes, correction=0, keepdim=True)
    weight = ((weight - mean) / (deviation + 1e-5)).float()
    if self.same_pad:
      x = timm.layers.pad_same(x, self.kernel_size, self.stride)
    convolve = torch.nn.functional.conv2d
    return convolve(x, weight, None, self.stride, self.padding)


def backbone(depths, **settings):
  return resnetv2.ResNetV2(
    layers=depths,
    channels=tuple(256 * 2**i for i in range(len(depths))),
    **settings,
  )


def bit(depths):
  """Returns BiT's ResNet; only ε of the convolutions differs from timm's."""
  convolution = functools.partial(StdConv2d, eps=1e-10)
  return backbone(
    depths, num_classes=7, stem_type='fixed', conv_layer=convolution
  ).eval()


def hybrid(depths, patch_size, image_size, depth=2):
  """Returns a hybrid with the official code's constants."""
  settings = dict(
    stem_type='same',
    preact=False,
    conv_layer=_ByDeviation,
    norm_layer=functools.partial(GroupNormAct, num_groups=32, eps=1e-6),
  )
  if depths:
    stem = backbone(depths, num_classes=0, global_pool='', **settings)
  else:
    stem = resnetv2.create_resnetv2_stem(3, **settings)
  return vision_transformer.VisionTransformer(
    img_size=image_size,
    patch_size=patch_size,
    num_classes=7,
    embed_layer=functools.partial(HybridEmbed, backbone=stem),
    act_layer=functools.partial(torch.nn.GELU, approximate='tanh'),
    embed_dim=64,
    depth=depth,
    mlp_ratio=1.5,
    num_heads=4,
  ).eval()


def nchw(images):
  return torch.from_numpy(np.asarray(images).transpose(0, 3, 1, 2).copy())


def nhwc(tensor):
  return tensor.detach().numpy().transpose(0, 2, 3, 1)


def allclose(ours, theirs):
  """Checks a difference of at most 1e-4 relative to the largest value."""
  ours, theirs = np.asarray(ours), np.asarray(theirs)
  size = max(1.0, float(theirs.std()))
  assert theirs.std() > 0.1
  np.testing.assert_allclose(ours / size, theirs / size, rtol=0, atol=1e-4)


def bit_model(depths=(1, 3)):
  return resnet.Model(7, depths=depths, width_factor=1, dtype='float32')


def hybrid_model(depths=(2, 1), patch_size=1, **sizes):
  stem = dict(name='resnet', depths=depths)
  return vit.Model(7, **SIZES | sizes, patch_size=patch_size, stem=stem)


def saved(tmp_path, model, size):
  """Returns (path, parameters) of random weights in an official file."""
  params, path = noise_params(model, size), str(tmp_path / 'weights.npz')
  npz.save(path, params, None)
  return path, params


@pytest.mark.slow
def test_bit_equals_timm(tmp_path):
  """Each stage's map and the logits, on maps with odd sides too."""
  path, params = saved(tmp_path, bit_model(), (45, 38))
  peer, images = bit((1, 3)), images_of(2, 45, 38)
  peer.load_pretrained(path, PREFIX)
  with torch.no_grad():
    last, theirs = peer.forward_intermediates(nchw(images))
    logits = peer.forward_head(last)
  model, params = load_pretrained(path)

  def results(params):
    variables = {'params': params}
    return model.apply(variables, images, method='maps'), model.apply(
      variables, images
    )

  maps, ours = jax.jit(results)(params)
  for map_, other in zip(maps, theirs[1:], strict=True):
    allclose(map_, nhwc(other))
  allclose(ours, logits)


@pytest.mark.slow
@pytest.mark.parametrize(
  'depths, patch_size, size',
  [((2, 1), 1, (30, 45)), *further([(), 4, (64, 32)])],
)
def test_hybrids_equal_timm(tmp_path, depths, patch_size, size):
  """Every block's tokens and the logits."""
  model = hybrid_model(depths, patch_size)
  path, params = saved(tmp_path, model, size)
  peer = hybrid(depths, patch_size, size)
  peer.load_pretrained(path)
  same_results((model, params), peer, size, limit=2e-5)


@pytest.mark.slow
def test_group_norms_of_one_dimension_are_read(tmp_path):
  """They are [1, 1, 1, channels] in official files, and [channels] in later."""
  path, params = saved(tmp_path, hybrid_model(), (32, 32))
  with np.load(path) as file:
    assert file['block1/unit2/gn3/scale'].shape == (1, 1, 1, 256)
    arrays = {k: v.squeeze() if 'gn' in k else v for k, v in file.items()}
  np.savez(path, **arrays)
  again = load_pretrained(path).params
  jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['hybrid', *further('bit')])
def test_gradients_equal_torch(tmp_path, kind):
  """A unit that changes the shape and one that does not, and other layers.

  Our gradients are written to a file like weights, so that timm's loader puts
  each next to its parameter.
  """
  size = (16, 16)
  if kind == 'bit':
    model, other = bit_model((2,)), [bit((2,)) for _ in range(2)]
  else:
    model = hybrid_model((2,), depth=1)
    other = [hybrid((2,), 1, size, depth=1) for _ in range(2)]
  prefix = PREFIX if kind == 'bit' else ''
  path, params = saved(tmp_path, model, size)
  peer, ours = (noisy(each) for each in other)
  peer.load_pretrained(path, prefix)
  images = images_of(4, *size)
  weights = np.random.default_rng(1).normal(size=(4, 7)).astype(np.float32)

  def loss(params):
    return (model.apply({'params': params}, images) * weights).mean()

  npz.save(path, jax.jit(jax.grad(loss))(params), None)
  ours.load_pretrained(path, prefix)
  (peer(nchw(images)) * torch.from_numpy(weights)).mean().backward()
  for (name, mine), theirs in zip(
    ours.named_parameters(), peer.parameters(), strict=True
  ):
    scale = theirs.grad.abs().max()
    assert scale > 0, name
    assert (mine - theirs.grad).abs().max() < 1e-4 * max(scale, 1e-2), name


def test_finetuning_uses_the_architecture_of_the_file(tmp_path):
  """This includes the stem; another one in the config is refused."""
  config = loading.load('configs/finetune.py:data=cifar10')
  source = pretrained.find(saved(tmp_path, hybrid_model(), (32, 32))[0])
  adopted = architecture.adopt(config, source)
  stem = dict(name='resnet', depths=(2, 1), width_factor=1)
  assert adopted.model.stem.to_dict() == stem
  with config.unlocked():
    config.model.variant = 'R50+B/16'
  with pytest.raises(UserError, match='stem: .*in the weights'):
    architecture.adopt(config, source)
  resnets = pretrained.find(saved(tmp_path, bit_model(), (32, 32))[0])
  with pytest.raises(UserError, match='model.name=resnet'):
    architecture.adopt(config, resnets)


@pytest.mark.slow
def test_the_first_convolution_is_kept_for_images_with_own_statistics(tmp_path):
  """Norms after it remove the scale of its inputs."""
  path, params = saved(tmp_path, bit_model((1,)), (32, 32))
  section = dict(name='resnet', depths=(1,), width_factor=1, dtype='float32')
  section |= dict(mean=(0.3, 0.2, 0.1), std=(0.1, 0.2, 0.3))
  config = minimal_config.completed(model=section, image_size=(32, 32))
  target = Experiment.build(config, jax.devices()[:1])
  with jax.set_mesh(target.mesh):
    moved = transfer.transfer(pretrained.find(path), target, None)
  for name in params.keys() - {'head'}:
    jax.tree.map(np.testing.assert_array_equal, moved[name], params[name])
