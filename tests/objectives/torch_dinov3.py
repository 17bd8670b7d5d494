"""DINOv3's training step in torch, from the paper (arXiv 2508.10104).

What does not differ from DINOv2 is that of `torch_dinov2`. Crops are ordered as
there: the first global crop of all images, then the second.
"""

import math

import torch
import torch.nn.functional as F
import torch_dinov2
import torch_vit
from torch_dinov2 import cross_entropy, koleo, sinkhorn


def rotation(rows, columns, channels, draw):
  """Returns sines and cosines `[n, 1, patches, channels]`."""
  y, x = (2 * (torch.arange(k).double() + 0.5) / k - 1 for k in (rows, columns))
  at = torch.stack(torch.meshgrid(y, x, indexing='ij'), -1).reshape(1, -1, 2)
  if draw is not None:
    shift, jitter, rescale = draw
    at = (at + shift) * torch.exp(jitter) * torch.exp(rescale)
  periods = 100 ** (2 * torch.arange(channels // 4).double() / (channels // 2))
  angles = 2 * math.pi * at[..., None] / periods  # [n, p, 2, c / 4]
  angles = angles.flatten(2).tile(2)[:, None]
  return angles.sin(), angles.cos()


def rotated(x, sines, cosines, prefix):
  first, second = x[:, :, prefix:].chunk(2, -1)
  turned = x[:, :, prefix:] * cosines + torch.cat([-second, first], -1) * sines
  return torch.cat([x[:, :, :prefix], turned], 2)


def backbone(images, p, side, draws=None, mask=None, norm=None):
  """Returns the tokens after the last norm, prefix tokens first.

  Args:
    images: `[n, y, x, 3]`.
    p: parameters.
    side: side of a patch.
    draws: shift, jitter and rescaling for each layer, or None.
    mask: masks and mask token, or None.
    norm: parameters of the last norm, or None for the model's.
  """
  x = torch_vit.embed(images, p['embedding'], side)
  if mask is not None:
    x = torch.where(mask[0][:, :, None], mask[1][None], x)
  prefix = torch.cat(
    [p['cls'], *([p['registers']] if 'registers' in p else [])], 1
  )
  count = prefix.shape[1]
  x = torch.cat([prefix.expand(len(x), -1, -1), x], 1)
  grid = images.shape[1] // side, images.shape[2] // side
  stack = p['encoder']['layers']
  for i in range(len(stack['scale1'])):

    def at(q, i=i):
      return {key: leaf[i] for key, leaf in q.items()}

    attention = stack['attention']
    y = torch_vit.norm(x, at(stack['norm1']))
    parts = []
    for name in ('query', 'key', 'value'):
      own = at(attention[name])
      z = torch.tensordot(y, own['kernel'], 1) + own.get('bias', 0)
      parts.append(z.transpose(1, 2))  # [n, h, t, c]
    angles = rotation(*grid, parts[0].shape[-1], draws and draws[i])
    parts[:2] = (rotated(z, *angles, count) for z in parts[:2])
    y = F.scaled_dot_product_attention(*parts).transpose(1, 2)
    x = x + torch_vit.dense(y, at(attention['out']), 2) * stack['scale1'][i]
    y = torch_vit.norm(x, at(stack['norm2']))
    y = F.gelu(torch_vit.dense(y, at(stack['mlp']['fc1'])))
    x = x + torch_vit.dense(y, at(stack['mlp']['fc2'])) * stack['scale2'][i]
  return torch_vit.norm(x, p['encoder']['norm'] if norm is None else norm)


def head(x, p):
  for i in (1, 2, 3):
    x = torch_vit.dense(x, p[f'fc{i}'])
    x = F.gelu(x) if i < 3 else x
  return F.normalize(x, dim=-1, eps=1e-12) @ p['last']['kernel']


def gram(tokens, maps, grid):
  """Mean squared difference of the patches' cosine similarities."""
  maps = F.interpolate(maps, grid, mode='bicubic', align_corners=False)
  x, y = (
    F.normalize(z, dim=-1) for z in (tokens, maps.flatten(2).transpose(1, 2))
  )
  return F.mse_loss(x @ x.transpose(1, 2), y @ y.transpose(1, 2))


class Training(torch_dinov2.Training):
  """Student, teachers and optimizer; the batch of one GPU is a group.

  `settings` has, in addition, `local_weight`, `gram_at` (steps of replacement),
  `gram_warmup`, `constant` (whether rates and weight decay are constant) and
  `parts` (number of micro-batches).
  """

  gram_teacher = None  # set for Gram anchoring

  def gram_weight(self):
    return 2.0 * min(self.it / self.settings['gram_warmup'], 1)

  def rates(self):
    s = self.settings
    if not s['constant']:
      return super().rates()
    return s['lr'] * min(self.it / s['warmup'], 1), 0.04

  def _losses(self, batch):
    parts = self.settings['parts']
    found = []
    for i in range(parts):
      part = {k: x[i::parts] for k, x in batch.items() if k != 'draws'}
      found.append(self._part(part, *batch['draws'][i]))
    return {k: sum(each[k] for each in found) / parts for k in found[0]}

  def _part(self, batch, global_draws, local_draws):
    s, side = self.settings, self.settings['side']

    def flat(crops):  # [n, crops, …] → [crops · n, …]
      return crops.transpose(0, 1).flatten(0, 1)

    def reordered(draws, count):
      return draws and [
        [flat(z.reshape(-1, count, *z.shape[1:])) for z in layer]
        for layer in draws
      ]

    images, masks = flat(batch['global']), flat(batch['masks'])
    warm = s['temperature_warmup']
    temperature = 0.07
    if self.it < warm:
      temperature = 0.04 + (0.07 - 0.04) * self.it / (warm - 1)
    prefix = 1 + s['registers']

    with torch.no_grad():
      t = self.teacher
      x = backbone(images, t['model'], side)
      targets = sinkhorn(head(x[:, 0], t['head']), temperature)
      logits = head(x[:, prefix:][masks], t['patch_head'])
      patch_targets = sinkhorn(logits, temperature)

    p, mask = self.student, (masks, self.student['mask'])
    x = backbone(images, p['model'], side, reordered(global_draws, 2), mask)
    locals_ = batch['local'].shape[1]
    y = backbone(
      flat(batch['local']),
      p['model'],
      side,
      reordered(local_draws, locals_),
      norm=p.get('local_norm'),
    )[:, 0]
    mine = F.log_softmax(head(x[:, 0], p['head']) / 0.1, -1).chunk(2)
    small = F.log_softmax(head(y, p['head']) / 0.1, -1).chunk(locals_)
    theirs = targets.chunk(2)
    # The teacher of a global crop is compared with the student of the other.
    first = sum(-(theirs[1 - i] * mine[i]).sum(-1).mean() for i in (0, 1)) / 2
    second = sum(-(t * z).sum(-1).mean() for t in theirs for z in small)
    second = second / (2 * locals_)
    g, l = 2, 2 * locals_
    crop = (g * first + s['local_weight'] * l * second) / (g + l)

    ce = cross_entropy(
      patch_targets, head(x[:, prefix:][masks], p['patch_head']) / 0.1
    )
    weight = 1 / masks.sum(1).clamp(min=1)[:, None].expand_as(masks)[masks]
    patch = (ce * weight).sum() / len(masks)
    groups = [z.split(s['group']) for z in x[:, 0].chunk(2)]
    spread = sum(sum(map(koleo, each)) / len(each) for each in groups)
    losses = {'crop': crop, 'patch': patch, 'koleo': spread}
    if self.gram_teacher is not None:
      with torch.no_grad():
        crops = flat(batch['gram'])
        maps = backbone(crops, self.gram_teacher, side)[:, prefix:]
        rows = crops.shape[1] // side
        maps = maps.transpose(1, 2).unflatten(2, (rows, -1))
      losses['gram'] = gram(x[:, prefix:], maps, s['grid'])
    return losses

  def step(self, batch):
    losses = super().step(batch)
    if self.gram_teacher is not None and self.it in self.settings['gram_at']:
      self.gram_teacher = copied(self.teacher['model'])
    return losses


def copied(tensors):
  return {
    key: copied(x) if isinstance(x, dict) else x.detach().clone()
    for key, x in tensors.items()
  }
