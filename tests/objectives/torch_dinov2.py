"""DINOv2's training step in torch, from the paper (arXiv 2304.07193).

Only names and shapes of parameters are those of vit_jax. Crops are ordered as
in the original code: the first global crop of all images, then the second.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
import torch_vit


def interpolate(table, old, new):
  """Interpolates positions `[1, 1 + old², d]` to a grid, as DINOv2 does."""
  if tuple(old) == tuple(new):
    return table
  prefix, grid = table[:, :1], table[:, 1:]
  grid = grid.reshape(1, *old, -1).permute(0, 3, 1, 2)
  factors = [(n + 0.1) / o for n, o in zip(new, old, strict=True)]
  grid = F.interpolate(grid, scale_factor=factors, mode='bicubic')
  assert grid.shape[2:] == tuple(new)
  return torch.cat([prefix, grid.permute(0, 2, 3, 1).flatten(1, 2)], 1)


def backbone(images, p, mask_token, masks, side, grid):
  """Returns all tokens after the last norm; the class token is the first."""
  x = torch_vit.embed(images, p['embedding'], side)
  if masks is not None:
    x = torch.where(masks[:, :, None], mask_token[None], x)
  x = torch.cat([p['cls'].expand(len(x), -1, -1), x], 1)
  new = images.shape[1] // side, images.shape[2] // side
  x = x + interpolate(p['position']['embedding'], grid, new)
  return torch_vit.encoder(x, p['encoder'])


def head(x, p):
  for i in (1, 2, 3):
    x = torch_vit.dense(x, p[f'fc{i}'])
    x = F.gelu(x) if i < 3 else x
  x = F.normalize(x, dim=-1)
  v = p['last']['kernel'].T
  return x @ (p['last']['gain'].T * v / v.norm(dim=1, keepdim=True)).T


def sinkhorn(logits, temperature):
  """Scales a matrix [prototypes, samples] as in the original code."""
  q = torch.exp(logits / temperature).T
  prototypes, samples = q.shape
  q = q / q.sum()
  for _ in range(3):
    q = q / q.sum(1, keepdim=True) / prototypes
    q = q / q.sum(0, keepdim=True) / samples
  return (q * samples).T


def koleo(x):
  x = F.normalize(x, dim=-1, eps=1e-8)
  dots = (x @ x.T).detach()
  dots.fill_diagonal_(-1)
  distance = F.pairwise_distance(x, x[dots.argmax(1)], eps=1e-8)
  return -torch.log(distance + 1e-8).mean()


class Training:
  """Student, teacher, centres and optimizer.

  Attributes:
    student: nested tensors.
    teacher: nested tensors.
    centres: of class tokens and of patches.
  """

  def __init__(self, params, settings):
    self.settings = settings
    self.student = torch_vit.leaves(params)
    self.teacher = torch_vit.leaves(params)
    outputs = settings['outputs']
    self.centres = [torch.zeros(k, dtype=torch.float64) for k in outputs]
    groups = []
    for path, leaf in flat(self.student).items():
      stacked = 'layers/' in path
      groups.append(
        dict(params=[leaf], path=path, decays=decays(path), stacked=stacked)
      )
    self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999))
    self.it = 0

  def step(self, batch):
    """Trains one step; returns the losses."""
    losses = self._losses(batch)
    total = losses['crop'] + losses['patch'] + 0.1 * losses['koleo']
    total = total + losses.get('gram', 0) * self.gram_weight()
    self.adam.zero_grad()
    total.backward()
    modules = {}
    for path, leaf in flat(self.student).items():
      module = path.split('/')[0]
      of_backbone = module in ('mask', 'local_norm')
      modules.setdefault('model' if of_backbone else module, []).append(leaf)
    for leaves in modules.values():
      torch.nn.utils.clip_grad_norm_(leaves, self.settings['clip'])
    self._update()
    self._follow()
    self.it += 1
    return {k: float(v.detach()) for k, v in losses.items()} | {
      'loss': float(total.detach())
    }

  def _losses(self, batch):
    s = self.settings
    crops = batch['global']  # [n, 2, y, x, 3]
    n = len(crops)
    images = torch.cat([crops[:, 0], crops[:, 1]])
    masks = torch.cat([batch['masks'][:, 0], batch['masks'][:, 1]])  # [2 n, p]
    warm = s['temperature_warmup']
    ramp = np.append(np.linspace(0.04, 0.07, warm), [0.07] * 100)
    temperature = ramp[self.it]
    patch_head = 'patch_head' if 'patch_head' in self.student else 'head'

    with torch.no_grad():
      t = self.teacher
      x = backbone(images, t['model'], None, None, s['side'], s['grid'])
      first, second = x[:, 0].chunk(2)
      logits = head(torch.cat([second, first]), t['head'])  # in reverse order
      patch_logits = head(x[:, 1:][masks], t[patch_head])
      if s['centring'] == 'centre':
        targets = ((logits - self.centres[0]) / temperature).softmax(-1)
        patch_targets = (
          (patch_logits - self.centres[1]) / temperature
        ).softmax(-1)
        for i, values in enumerate((logits, patch_logits)):
          self.centres[i] = 0.9 * self.centres[i] + 0.1 * values.mean(0)
      else:
        targets = sinkhorn(logits, temperature)
        patch_targets = sinkhorn(patch_logits, temperature)

    p = self.student
    x = backbone(images, p['model'], p['mask'], masks, s['side'], s['grid'])
    tokens = x[:, 0]
    local = batch['local']
    count = local.shape[1]
    y = backbone(
      torch.cat([local[:, i] for i in range(count)]),
      p['model'],
      None,
      None,
      s['side'],
      s['grid'],
    )[:, 0]
    terms = 2 + 2 * count
    crop = 0
    for z in head(y, p['head']).chunk(count):
      for each in targets.chunk(2):
        crop = crop + cross_entropy(each, z / 0.1).mean()
    # Both global crops at once: two terms.
    z = head(tokens, p['head'])
    crop = crop + 2 * cross_entropy(targets, z / 0.1).mean()
    ce = cross_entropy(
      patch_targets, head(x[:, 1:][masks], p[patch_head]) / 0.1
    )
    weight = 1 / masks.sum(1).clamp(min=1)[:, None].expand_as(masks)[masks]
    patch = (ce * weight).sum() / len(masks)
    spread = 0
    for each in tokens.chunk(2):
      parts = each.split(s['group'])
      spread = spread + sum(map(koleo, parts)) / len(parts)
    del n
    return {'crop': crop / terms, 'patch': patch, 'koleo': spread}

  def gram_weight(self):
    return 0.0

  def rates(self):
    """Returns learning rate and weight decay of this step."""
    s, it = self.settings, self.it
    warm, total = s['warmup'], s['total']
    if it < warm:
      rate = s['lr'] * it / warm
    else:
      at = (it - warm) / (total - warm)
      rate = 1e-6 + 0.5 * (s['lr'] - 1e-6) * (1 + math.cos(math.pi * at))
    decay = 0.4 + 0.5 * (0.04 - 0.4) * (1 + math.cos(math.pi * it / total))
    return rate, decay

  def _update(self):
    """Sets rates and decays of this step, and updates the student."""
    s, it = self.settings, self.it
    rate, decay = self.rates()
    # A stack has a rate for each layer: torch updates it with the rate 1, and
    # the change is scaled afterwards.
    before = {}
    for group in self.adam.param_groups:
      path = group['path']
      frozen = 'last/' in path and it < s['frozen']
      group['lr'] = 0.0 if frozen else rate * self._factor(path)
      group['weight_decay'] = decay if group['decays'] else 0.0
      if group['stacked']:
        group['lr'] = rate
        before[path] = group['params'][0].detach().clone()
    self.adam.step()
    depth = s['depth']
    for path, old in before.items():
      leaf = flat(self.student)[path]
      factors = torch.tensor(
        [0.9 ** (depth - i) for i in range(depth)]
      ).double()
      factors = factors.reshape(-1, *[1] * (leaf.ndim - 1))
      with torch.no_grad():
        leaf.copy_(old + factors * (leaf - old))

  def _factor(self, path):
    first = 0.9 ** (self.settings['depth'] + 1)
    if path.startswith('model/embedding'):
      return first * 0.2
    first_layer = 'mask', 'model/cls', 'model/registers', 'model/position'
    if path.startswith(first_layer):
      return first
    return 1.0

  def _follow(self):
    end = self.settings.get('momentum_end', 1)
    kept = end + 0.5 * (self.settings['momentum'] - end) * (
      1 + math.cos(math.pi * self.it / self.settings['total'])
    )
    students = flat(self.student)
    with torch.no_grad():
      for path, leaf in flat(self.teacher).items():
        leaf.copy_(kept * leaf + (1 - kept) * students[path])


def cross_entropy(targets, logits):
  return -(targets * logits.log_softmax(-1)).sum(-1)


def decays(path):
  """Biases, norms and LayerScale do not decay."""
  end = path.rpartition('/')[2]
  return end not in ('bias', 'scale', 'scale1', 'scale2')


def flat(tensors, prefix=''):
  result = {}
  for key, value in tensors.items():
    path = f'{prefix}{key}'
    if isinstance(value, dict):
      result |= flat(value, f'{path}/')
    else:
      result[path] = value
  return result
