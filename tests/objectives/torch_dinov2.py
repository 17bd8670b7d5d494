"""Training steps of DINOv2 and DINOv3 in torch.

They follow the papers (arXiv 2304.07193 and 2508.10104). Only names and shapes
of parameters are those of vit_jax. Crops are ordered as in the original code:
the first global crop of all images, then the second.
"""

import functools
import math

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


def rotated(x, rows, columns, prefix, draw):
  """Rotates queries or keys `[n, h, t, c]` by their positions, as DINOv3."""
  y, z = (2 * (torch.arange(k).double() + 0.5) / k - 1 for k in (rows, columns))
  at = torch.stack(torch.meshgrid(y, z, indexing='ij'), -1).reshape(1, -1, 2)
  if draw is not None:
    shift, jitter, rescale = draw
    at = (at + shift) * torch.exp(jitter) * torch.exp(rescale)
  channels = x.shape[-1]
  periods = 100 ** (2 * torch.arange(channels // 4).double() / (channels // 2))
  angles = 2 * math.pi * at[..., None] / periods  # [n, p, 2, c / 4]
  angles = angles.flatten(2).tile(2)[:, None]
  first, second = x[:, :, prefix:].chunk(2, -1)
  turned = x[:, :, prefix:] * angles.cos()
  turned = turned + torch.cat([-second, first], -1) * angles.sin()
  return torch.cat([x[:, :, :prefix], turned], 2)


def backbone(images, p, side, grid, draws=None, mask=None):
  """Returns the tokens after the last norm, prefix tokens first.

  Args:
    images: `[n, y, x, 3]`.
    p: parameters; positions are rotations if there is no table of them.
    side: side of a patch.
    grid: rows and columns of the table of positions.
    draws: shift, jitter and rescaling of positions for each layer, or None.
    mask: masks and mask token, or None.
  """
  x = torch_vit.embed(images, p['embedding'], side)
  if mask is not None:
    x = torch.where(mask[0][:, :, None], mask[1][None], x)
  prefix = torch.cat([p[k] for k in ('cls', 'registers') if k in p], 1)
  x = torch.cat([prefix.expand(len(x), -1, -1), x], 1)
  new = images.shape[1] // side, images.shape[2] // side
  if 'position' in p:
    x = x + interpolate(p['position']['embedding'], grid, new)
    return torch_vit.encoder(x, p['encoder'])
  depth = len(p['encoder']['layers']['scale1'])
  rotations = [
    functools.partial(
      rotated, rows=new[0], columns=new[1], prefix=prefix.shape[1], draw=draw
    )
    for draw in draws or [None] * depth
  ]
  return torch_vit.encoder(x, p['encoder'], rotations=rotations)


def head(x, p, gain=None):
  """Computes logits.

  Args:
    x: features.
    p: parameters.
    gain: lengths of the prototypes if they are not learned; None for a plain
      layer.
  """
  for i in (1, 2, 3):
    x = torch_vit.dense(x, p[f'fc{i}'])
    x = F.gelu(x) if i < 3 else x
  kernel, gain = p['last']['kernel'], p['last'].get('gain', gain)
  if gain is not None:  # torch.nn.utils.weight_norm
    kernel = torch._weight_norm(kernel, gain, 1)
  return F.normalize(x, dim=-1) @ kernel


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


def gram(tokens, maps, grid):
  """Mean squared difference of the patches' cosine similarities."""
  maps = F.interpolate(maps, grid, mode='bicubic', align_corners=False)
  x, y = (
    F.normalize(z, dim=-1) for z in (tokens, maps.flatten(2).transpose(1, 2))
  )
  return F.mse_loss(x @ x.transpose(1, 2), y @ y.transpose(1, 2))


def cross_entropy(targets, logits):
  return -(targets * logits.log_softmax(-1)).sum(-1)


def by_crop(x):
  """Reorders `[n, crops, …]` to `[crops · n, …]`."""
  return x.transpose(0, 1).flatten(0, 1)


class Training:
  """Student, teachers, centres and optimizer; a group is the batch of a GPU.

  Attributes:
    student: nested tensors.
    teacher: nested tensors.
    gram_teacher: nested tensors of a backbone; None without Gram anchoring.
    centres: of class tokens and of patches.
  """

  def __init__(self, params, settings, gram_teacher=None):
    self.settings = settings
    self.student = torch_vit.leaves(params)
    self.teacher = torch_vit.leaves(params)
    self.gram_teacher = gram_teacher and torch_vit.leaves(gram_teacher)
    self.patch_head = 'patch_head' if 'patch_head' in params else 'head'
    self.centres = [
      torch.zeros(params[name]['last']['kernel'].shape[1]).double()
      for name in ('head', self.patch_head)
    ]
    groups = [
      dict(params=[leaf], path=path)
      for path, leaf in flat(self.student).items()
    ]
    self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.999))
    self.it = 0

  def step(self, batch):
    """Trains one step on micro-batches of every `parts`-th row.

    Returns the losses.
    """
    s, parts = self.settings, []
    for i in range(s['parts']):
      rows = {k: x[i :: s['parts']] for k, x in batch.items() if k != 'draws'}
      parts.append(self._losses(rows, *batch['draws'][i]))
    losses = {k: sum(each[k] for each in parts) / len(parts) for k in parts[0]}
    total = losses['crop'] + losses['patch'] + 0.1 * losses['koleo']
    if 'gram' in losses:
      weight = 2.0 * min(self.it / s['gram_warmup'], 1)
      total = total + weight * losses['gram']
    self.adam.zero_grad()
    total.backward()
    modules = {}
    for path, leaf in flat(self.student).items():
      module = path.split('/')[0]
      of_backbone = module in ('mask', 'local_norm')
      modules.setdefault('model' if of_backbone else module, []).append(leaf)
    for leaves in modules.values():
      torch.nn.utils.clip_grad_norm_(leaves, s['clip'])
    self._update()
    self._follow()
    self.it += 1
    if self.gram_teacher is not None and self.it in s['gram_at']:
      self.gram_teacher = copied(self.teacher['model'])
    return {k: float(v.detach()) for k, v in losses.items()} | {
      'loss': float(total.detach())
    }

  def _losses(self, batch, global_draws, local_draws):
    s, locals_ = self.settings, batch['local'].shape[1]
    images, masks = by_crop(batch['global']), by_crop(batch['masks'])
    p, t, prefix = self.student, self.teacher, 1 + s['registers']
    run = functools.partial(backbone, side=s['side'], grid=s['grid'])

    with torch.no_grad():
      x = run(images, t['model'])
      patch_logits = head(x[:, prefix:][masks], t[self.patch_head])
      targets, patch_targets = self._targets(
        head(x[:, 0], t['head']), patch_logits
      )

    draws = reordered(global_draws, 2)
    x = run(images, p['model'], draws=draws, mask=(masks, p['mask']))
    of_local = p['model']
    if 'local_norm' in p:
      encoder = of_local['encoder'] | {'norm': p['local_norm']}
      of_local = of_local | {'encoder': encoder}
    draws = reordered(local_draws, locals_)
    y = run(by_crop(batch['local']), of_local, draws=draws)
    mine = (head(x[:, 0], p['head']) / 0.1).chunk(2)
    small = (head(y[:, 0], p['head']) / 0.1).chunk(locals_)
    theirs = targets.chunk(2)
    # The teacher of a global crop is compared with the student of the other.
    first = sum(cross_entropy(theirs[1 - i], mine[i]).mean() for i in (0, 1))
    second = sum(cross_entropy(a, b).mean() for a in theirs for b in small)
    crop = (first + s['local_weight'] * second) / (2 + 2 * locals_)

    outputs = head(x[:, prefix:][masks], p[self.patch_head]) / 0.1
    weight = 1 / masks.sum(1).clamp(min=1)[:, None].expand_as(masks)[masks]
    patch = (cross_entropy(patch_targets, outputs) * weight).sum() / len(masks)
    groups = [z.split(s['group']) for z in x[:, 0].chunk(2)]
    spread = sum(sum(map(koleo, each)) / len(each) for each in groups)
    losses = {'crop': crop, 'patch': patch, 'koleo': spread}
    if self.gram_teacher is not None:
      with torch.no_grad():
        crops = by_crop(batch['gram'])
        maps = run(crops, self.gram_teacher)[:, prefix:].transpose(1, 2)
        maps = maps.unflatten(2, (crops.shape[1] // s['side'], -1))
      losses['gram'] = gram(x[:, prefix:], maps, s['grid'])
    return losses

  def _targets(self, *all_logits):
    """Returns the targets of class tokens and patches; updates the centres."""
    warm, temperature = self.settings['temperature_warmup'], 0.07
    if self.it < warm:
      temperature = 0.04 + (0.07 - 0.04) * self.it / (warm - 1)
    if self.settings['centring'] == 'sinkhorn_knopp':
      return [sinkhorn(logits, temperature) for logits in all_logits]
    targets = []
    for i, logits in enumerate(all_logits):
      targets.append(((logits - self.centres[i]) / temperature).softmax(-1))
      self.centres[i] = 0.9 * self.centres[i] + 0.1 * logits.mean(0)
    return targets

  def _rates(self):
    """Returns learning rate and weight decay of this step."""
    s, it = self.settings, self.it
    warm, total = s['warmup'], s['total']
    rate, decay = s['lr'] * min(it / warm, 1), 0.04
    if not s['constant']:
      decay = 0.4 + 0.5 * (0.04 - 0.4) * (1 + math.cos(math.pi * it / total))
      if it >= warm:
        at = (it - warm) / (total - warm)
        rate = 1e-6 + 0.5 * (s['lr'] - 1e-6) * (1 + math.cos(math.pi * at))
    return rate, decay

  def _update(self):
    """Sets rates and decays of this step, and updates the student."""
    s, it = self.settings, self.it
    rate, decay = self._rates()
    # A stack has a rate for each layer: torch updates it with the rate 1, and
    # the change is scaled afterwards.
    before = {}
    for group in self.adam.param_groups:
      path = group['path']
      frozen = 'last/' in path and it < s['frozen']
      group['lr'] = 0.0 if frozen else rate * self._factor(path)
      group['weight_decay'] = decay if decays(path) else 0.0
      if 'layers/' in path:
        group['lr'] = rate
        before[path] = group['params'][0].detach().clone()
    self.adam.step()
    depth = s['depth']
    for path, old in before.items():
      leaf = flat(self.student)[path]
      factors = torch.tensor([0.9 ** (depth - i) for i in range(depth)])
      factors = factors.double().reshape(-1, *[1] * (leaf.ndim - 1))
      with torch.no_grad():
        leaf.copy_(old + factors * (leaf - old))

  def _factor(self, path):
    first = 0.9 ** (self.settings['depth'] + 1)
    if path.startswith('model/embedding'):
      return first * 0.2
    first_layer = 'mask', 'model/cls', 'model/registers', 'model/position'
    return first if path.startswith(first_layer) else 1.0

  def _follow(self):
    s = self.settings
    progress = 1 + math.cos(math.pi * self.it / s['total'])
    kept = s['end'] + 0.5 * (s['momentum'] - s['end']) * progress
    students = flat(self.student)
    with torch.no_grad():
      for path, leaf in flat(self.teacher).items():
        leaf.copy_(kept * leaf + (1 - kept) * students[path])


def reordered(draws, count):
  """Reorders the draws of each layer for `count` crops like the crops."""
  return draws and [
    [by_crop(z.reshape(-1, count, *z.shape[1:])) for z in layer]
    for layer in draws
  ]


def decays(path):
  """Biases, norms and LayerScale do not decay."""
  end = path.rpartition('/')[2]
  return end not in ('bias', 'scale', 'scale1', 'scale2')


def copied(tensors):
  return {
    key: copied(x) if isinstance(x, dict) else x.detach().clone()
    for key, x in tensors.items()
  }


def flat(tensors, prefix=''):
  result = {}
  for key, value in tensors.items():
    path = f'{prefix}{key}'
    if isinstance(value, dict):
      result |= flat(value, f'{path}/')
    else:
      result[path] = value
  return result
