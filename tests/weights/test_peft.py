"""Tests of LoRA in PEFT's format, against the library itself."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from references import CLASSES, PATCH, SIZE, huggingface, images, torch
from safetensors.numpy import load_file, save_file

from tests.faults.counts import further
from vit_jax.arrays import checksum, sharding, tree
from vit_jax.errors import UserError
from vit_jax.models import layers
from vit_jax.objectives.contract import Inputs
from vit_jax.weights import adapters, names, pretrained
from vit_jax.weights.contract import Pretrained

peft = pytest.importorskip('peft')
# Other libraries' deprecations of each other.
pytestmark = pytest.mark.filterwarnings('ignore::FutureWarning')
RANK = 3
MESH = sharding.make_mesh(jax.devices()[:1])
MODELS = {
  'vit': 'ViTForImageClassification',
  'dinov2': 'Dinov2ForImageClassification',
  'dinov3': 'DINOv3ViTModel',
  'siglip': 'SiglipVisionModel',
}
TARGETS = ('query', 'key', 'value', 'out', 'fc1', 'fc2')


def run_of(base, classes, **lora):
  """Returns weights of a run with LoRA for a base, with random parameters."""
  source = pretrained.find(str(base))
  section = dict(rank=RANK, alpha=6.0, targets=TARGETS, bias='none') | lora
  config = dict(
    lora=section,
    init_from=str(base),
    init_weights='params',
    position_resize=None,
  )
  plain = dataclasses.replace(
    source.description,
    model={**source.description.model, 'pre_logits': False},
    num_classes=classes,
    class_names=tuple(f'kind {i}' for i in range(classes)),
    config=config,
  )
  frozen = adapters.base(
    pretrained.find, config, plain.built_model, plain.image_size
  )
  digest = checksum.digest(frozen.load(MESH))
  record = {'record': {'frozen': {'base': digest}}}
  plain = dataclasses.replace(plain, further=record)
  rng = np.random.default_rng(1)

  def load(abstract):
    return jax.tree.map(
      lambda s: sharding.place(np.float32(rng.normal(0, 0.2, s.shape)), s),
      abstract,
    )

  run = adapters.unmerged(Pretrained('RUN', plain, load), pretrained.find)
  trained = loaded(run)  # the same numbers whenever they are loaded
  return dataclasses.replace(run, load=lambda abstract: trained)


def loaded(source):
  return source.load(source.abstract_params())


def written(tmp_path, kind, **lora):
  """Writes a base and an adapter; returns the base's model and the run."""
  base = huggingface(MODELS[kind])
  base.save_pretrained(tmp_path / 'base')
  classes = CLASSES if hasattr(base, 'classifier') else 0
  run = run_of(tmp_path / 'base', classes, **lora)
  pretrained.save(f'peft:{tmp_path}/adapter', loaded(run), run.description)
  return base, run


def outputs(model, source, pixels):
  """Returns logits, or features, of a torch model for pixels in [-1, 1]."""
  mean, std = (
    np.float32(x)[:, None, None] for x in source.description.statistics
  )
  values = (pixels.transpose(0, 3, 1, 2) + 1) / 2
  found = model(torch.from_numpy(np.float32((values - mean) / std)))
  return found.logits if hasattr(found, 'logits') else found.pooler_output


@pytest.mark.slow
@pytest.mark.parametrize('kind', [*MODELS][:2] + further(*[*MODELS][2:]))
def test_peft_and_we_load_the_same_model(tmp_path, kind):
  """Merged parameters, our reading of the adapter and `peft` agree."""
  base, run = written(tmp_path, kind)
  merged = adapters.merged(run)
  params = loaded(merged)
  again = pretrained.find(f'{tmp_path}/adapter')
  assert again.description.class_names == run.description.class_names
  assert again.image_size == (SIZE, SIZE)
  for path, leaf in tree.flatten(loaded(again)).items():
    expected = tree.flatten(params)[path]
    np.testing.assert_allclose(leaf, expected, atol=1e-6, err_msg=path)
  pixels = images()
  model = merged.changed(dtype='float32').model()
  found = model.apply({'params': params}, pixels, method='predict')
  found = found['logits' if model.num_classes else 'features']
  with torch.no_grad():
    before = outputs(base, merged, pixels).numpy()
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / 'adapter')
    after = outputs(theirs, merged, pixels).numpy()
  assert np.abs(before - after).max() > 0.05
  np.testing.assert_allclose(found, after, atol=1e-5, rtol=1e-5)


class Masked(torch.nn.Module):
  """Dropout with a given mask."""

  def __init__(self, mask):
    super().__init__()
    self.mask = torch.from_numpy(np.array(mask))

  def forward(self, x):
    return x * self.mask


@pytest.mark.slow
@pytest.mark.parametrize('rate', [0.0, 0.5])
def test_gradients_are_those_of_peft(tmp_path, rate):
  """Of A, B and the head, for the same model, images and labels.

  With dropout, the layers of `peft` get the masks that ours draw.
  """
  base, run = written(tmp_path, 'vit', dropout=rate)
  rng = np.random.default_rng(0)
  image = rng.integers(0, 256, (4, SIZE, SIZE, 3)).astype(np.uint8)
  label = rng.integers(0, CLASSES, 4)
  theirs = peft.PeftModel.from_pretrained(
    base, tmp_path / 'adapter', is_trainable=True
  )
  assert theirs.peft_config['default'].lora_dropout == rate
  params, key = loaded(run), jax.random.key(5)
  flat = tree.flatten(params['lora'])
  for i, path in enumerate(flat):
    if not path.endswith('/b'):
      continue
    layer = path.removesuffix('/b')
    name = names.table('vit')[layer].name.removeprefix('layers.{i}.')
    a = flat[f'{layer}/a']
    own = jax.random.fold_in(jax.random.fold_in(key, 0x6C6F7261), i)
    for number, each in enumerate(jax.random.split(own, len(a))):
      block = theirs.base_model.model.vit.layers[number]
      module = block.get_submodule(name)
      assert getattr(module.lora_dropout['default'], 'p', 0) == rate
      if rate:
        ones = jnp.ones((4, (SIZE // PATCH) ** 2 + 1, a.shape[1]))
        mask = layers.dropout(ones, rate, each)
        module.lora_dropout['default'] = Masked(mask)
  logits = outputs(theirs, run, np.float32(image) / 127.5 - 1)
  torch.nn.functional.cross_entropy(logits, torch.from_numpy(label)).backward()
  expected = {
    name.replace('.default', '').replace('.modules_to_save', ''): p.grad
    for name, p in theirs.named_parameters()
    if p.grad is not None
  }
  objective = run.changed(dtype='float32').objective()
  frozen = {'base': run.description.frozen.load(MESH)}
  batch = {'image': jnp.array(image), 'label': jnp.array(label)}
  inputs = Inputs({}, batch, key, jnp.array(0), frozen)
  found = jax.jit(jax.grad(lambda p: objective.loss(p, inputs)[0]))(params)
  pretrained.save(f'peft:{tmp_path}/gradients', found, run.description)
  gradients = load_file(tmp_path / 'gradients/adapter_model.safetensors')
  assert gradients.keys() == expected.keys() and len(expected) == 26
  for name, gradient in gradients.items():
    assert np.abs(gradient).max() > 1e-3
    np.testing.assert_allclose(gradient, expected[name].numpy(), atol=1e-5)


@pytest.mark.slow
def test_adapters_of_peft_open_with_their_base(tmp_path):
  """With rsLoRA, and another rank of one layer."""
  base = huggingface()
  base.save_pretrained(tmp_path / 'base')
  config = peft.LoraConfig(
    r=4,
    lora_alpha=6,
    target_modules=['q_proj', 'fc2'],
    modules_to_save=['classifier'],
    lora_dropout=0.5,  # not in predictions
    use_rslora=True,
    rank_pattern={'layers.1.mlp.fc2': 2},
  )
  theirs = peft.get_peft_model(base, config)
  with torch.no_grad():
    for parameter in theirs.parameters():
      if parameter.requires_grad:  # not those of the base
        parameter.add_(0.1 * torch.randn(parameter.shape))
  theirs.peft_config['default'].base_model_name_or_path = str(tmp_path / 'base')
  theirs.save_pretrained(tmp_path / 'adapter')
  source = pretrained.find(str(tmp_path / 'adapter'))
  model, params = pretrained.load_pretrained(str(tmp_path / 'adapter'))
  pixels = images()
  with torch.no_grad():
    expected = outputs(theirs.eval(), source, pixels).numpy()
  found = model.apply({'params': params}, pixels)
  np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-5)

  # Layers of a text tower are not taken for those of the image tower.
  file = tmp_path / 'adapter/adapter_model.safetensors'
  arrays = {
    re.sub(r'model\.vit\.(layers.*attention)', r'model.text_model.\1', name): v
    for name, v in load_file(file).items()
  }
  save_file(arrays, file)
  with pytest.raises(UserError, match=r'do not fit.*text_model\.layers'):
    pretrained.find(str(tmp_path / 'adapter'))
  save_file({k: v for k, v in arrays.items() if '.bias' not in k}, file)
  with pytest.raises(UserError, match=r'do not fit.*classifier\.weight'):
    pretrained.find(str(tmp_path / 'adapter'))


@pytest.mark.parametrize(
  'changes, expected',
  [
    (dict(use_dora=True), 'use_dora.*merge_and_unload'),
    (dict(lora_alpha='16'), "lora_alpha is '16'"),
    (dict(base_model_name_or_path=None), 'base_model_name_or_path'),
    (dict(base_model_name_or_path='/nowhere/x'), '/nowhere/x.*not exist'),
  ],
)
def test_adapters_that_cannot_be_opened_are_refused(
  tmp_path, changes, expected
):
  config = dict(peft_type='LORA', r=2, base_model_name_or_path='base')
  text = json.dumps(config | changes)
  (tmp_path / 'adapter_config.json').write_text(text)
  with pytest.raises(UserError, match=expected):
    pretrained.find(str(tmp_path))
