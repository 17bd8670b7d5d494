"""Twenty training steps of a Swin Transformer against timm's.

timm's network in PyTorch gives loss and gradient of each step; Adam is as in
test_plain_path. Ours runs on eight devices with every axis of the mesh.
"""

import jax
import numpy as np
import pytest
import torch

from benchmarks.peers import import_timm
from tests.training import plain_steps
from vit_jax.arrays import tree
from vit_jax.weights.formats import swin

timm = import_timm()
# The config has model.pixels='imagenet'.
MEAN = np.array([0.485, 0.456, 0.406])
STD = np.array([0.229, 0.224, 0.225])
SIZES = dict(
  model__width=32,
  model__depths=(2, 2),
  model__num_heads=2,
  model__window_size=2,
  model__drop_path=0.0,
  mix__mixup=0.0,
  mix__cutmix=0.0,
  mix__erasing=0.0,
)


def peer():
  """Returns timm's model; its maps are 8x8 and 4x4, with shifted windows."""
  return timm.models.swin_transformer.SwinTransformer(
    img_size=32,
    patch_size=4,
    num_classes=plain_steps.CLASSES,
    embed_dim=32,
    depths=(2, 2),
    num_heads=(2, 4),
    window_size=2,
    drop_path_rate=0.0,
  )


def gradient_of(theirs, names):
  """Returns a function from parameters and a batch to loss and gradient."""

  def gradient(params, image, label):
    flat = tree.flatten(jax.device_get(params))
    arrays = dict(names.export(flat))
    theirs.load_state_dict({k: torch.tensor(v) for k, v in arrays.items()})
    theirs.zero_grad()
    images = torch.tensor((image / 255 - MEAN) / STD).float()
    images = images.permute(0, 3, 1, 2)
    loss = torch.nn.functional.cross_entropy(
      theirs(images), torch.tensor(label).long(), label_smoothing=0.1
    )
    loss.backward()
    grads = {k: p.grad.numpy() for k, p in theirs.named_parameters()}
    shapes = {path: leaf.shape for path, leaf in flat.items()}
    return loss.item(), tree.unflatten(names.native(grads, shapes))

  return gradient


@pytest.mark.slow
def test_steps_equal_timm():
  """The mesh is data=2, fsdp=2, model=2, with two micro-batches."""
  experiment = plain_steps.build(
    'configs/swin_i1k.py', image_size=(32, 32), **SIZES, **plain_steps.MESH
  )
  names = swin.names(len(experiment.model.depths))
  plain_steps.check(experiment, gradient_of(peer(), names))
