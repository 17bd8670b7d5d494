"""timm's ResNets with the official constants, and official files of them."""

import functools

import numpy as np
from references import timm, torch
from timm.layers import GroupNormAct, StdConv2d, StdConv2dSame
from timm.models import resnetv2, vision_transformer
from timm.models.vision_transformer_hybrid import HybridEmbed


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


def randomized(model, seed=0):
  """Sets every parameter to random numbers of a useful scale."""
  torch.manual_seed(seed)
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.add_(0.2 * torch.randn_like(parameter))
  return model.eval()


def bit(depths, num_classes, width_factor=1):
  """Returns BiT's ResNet; only ε of the convolutions differs from timm's."""
  return resnetv2.ResNetV2(
    layers=depths,
    channels=tuple(256 * 2**i for i in range(len(depths))),
    num_classes=num_classes,
    width_factor=width_factor,
    stem_type='fixed',
    conv_layer=functools.partial(StdConv2d, eps=1e-10),
  )


def hybrid(depths, patch_size, image_size, num_classes, **sizes):
  """Returns a hybrid with the official code's constants."""
  settings = dict(
    stem_type='same',
    preact=False,
    conv_layer=_ByDeviation,
    norm_layer=functools.partial(GroupNormAct, num_groups=32, eps=1e-6),
  )
  if depths:
    backbone = resnetv2.ResNetV2(
      layers=depths,
      channels=tuple(256 * 2**i for i in range(len(depths))),
      num_classes=0,
      global_pool='',
      **settings,
    )
  else:
    backbone = resnetv2.create_resnetv2_stem(3, **settings)
  return vision_transformer.VisionTransformer(
    img_size=image_size,
    patch_size=patch_size,
    num_classes=num_classes,
    embed_layer=functools.partial(HybridEmbed, backbone=backbone),
    act_layer=functools.partial(torch.nn.GELU, approximate='tanh'),
    **sizes,
  )


def nchw(images):
  return torch.from_numpy(np.asarray(images).transpose(0, 3, 1, 2).copy())


def nhwc(tensor):
  return tensor.detach().numpy().transpose(0, 2, 3, 1)
