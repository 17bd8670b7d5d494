"""Tests of MAE's decoders in files of other projects."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
from minimal_config import completed
from references import DEPTH, HEADS, PATCH, SIZE, WIDTH, torch

from tests.faults.counts import further
from tests.indexed_source import Numbered
from vit_jax.arrays.pixels import IMAGENET
from vit_jax.objectives.mixing import normalize
from vit_jax.training.experiment import Experiment
from vit_jax.weights import pretrained, transfer

DECODER = dict(width=64, depth=3, mlp_dim=48, num_heads=2)
COUNT = (SIZE // PATCH) ** 2


def reference(**changes):
  """Returns a model of the library with random weights."""
  sizes = dict(
    layer_norm_eps=1e-6,
    decoder_hidden_size=DECODER['width'],
    decoder_num_hidden_layers=DECODER['depth'],
    decoder_num_attention_heads=DECODER['num_heads'],
    decoder_intermediate_size=DECODER['mlp_dim'],
  )
  return references.huggingface('ViTMAEForPreTraining', **(sizes | changes))


def written(folder, model, statistics=IMAGENET, fixed=True):
  """Writes a directory of the library, optionally with the fixed positions."""
  if fixed:  # `noisy` has changed them
    model.decoder.initialize_weights(COUNT)
  model.save_pretrained(folder)
  mean, std = statistics
  processor = dict(image_mean=mean, image_std=std)
  (folder / 'preprocessor_config.json').write_text(json.dumps(processor))
  return str(folder)


NAMES = {
  'vit.embeddings.patch_embeddings.projection': 'patch_embed.proj',
  'vit.embeddings.position_embeddings': 'pos_embed',
  'vit.embeddings.': '',
  'vit.layernorm': 'norm',
  'vit.layers': 'blocks',
  'decoder.decoder_layers': 'decoder_blocks',
  'decoder.': '',
  'attention.o_proj': 'attn.proj',
  'layernorm_before': 'norm1',
  'layernorm_after': 'norm2',
}


def authors_file(folder, model, name):
  """Writes the same weights with the names of MAE's authors."""
  state = {}
  for key, leaf in model.state_dict().items():
    for theirs, authors in NAMES.items():
      key = key.replace(theirs, authors)
    state[key] = leaf
  for key in [key for key in state if '.q_proj.' in key]:
    parts = [state.pop(key.replace('.q_', f'.{kind}_')) for kind in 'qkv']
    state[key.replace('attention.q_proj', 'attn.qkv')] = torch.cat(parts)
  torch.save({'model': state}, folder / name)
  return str(folder / name)


def same_predictions(model, source):
  """Compares predicted patches for the same masks, to 1e-5."""
  objective, params = source.objective(), source.load(source.abstract_params())
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (3, SIZE, SIZE, 3), dtype=np.uint8)
  batch = {'image': jnp.asarray(images)}
  order = objective._order(batch, jax.random.key(0))
  pixels = (images / 255 - np.array(IMAGENET[0])) / np.array(IMAGENET[1])
  with torch.no_grad():
    expected = model(
      torch.tensor(pixels.transpose(0, 3, 1, 2), dtype=torch.float32),
      noise=torch.tensor(np.argsort(order).astype(np.float32)),
    )
  hidden = expected.mask.numpy() > 0
  assert hidden.sum() == 3 * COUNT * 3 // 4
  logits = expected.logits.numpy()[hidden]

  @jax.jit
  def predict(params):
    pixels = normalize(batch['image'])
    tokens = objective._encode(params['model'], pixels, order, None)
    return objective._decode(params['decoder'], tokens, order)

  ours = np.asarray(predict(params))[hidden]
  assert np.ptp(logits) > 0.5
  assert np.abs(ours - logits).max() <= 1e-5 * np.abs(logits).max()


@pytest.mark.slow
@pytest.mark.parametrize('norm', [True, *further(False)])
def test_predictions_equal_the_library(tmp_path, norm):
  model = reference(norm_pix_loss=norm)
  source = pretrained.find(written(tmp_path, model))
  assert source.objective().norm_pixels == norm
  same_predictions(model, source)


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, norm',
  [('mae_full.pth', True), *further(['mae_visualize_vit_base.pth', False])],
)
def test_files_of_the_authors(tmp_path, name, norm):
  """The names show the number of heads and the target of released files."""
  model = reference()
  written(tmp_path / 'library', model)
  source = pretrained.find(authors_file(tmp_path, model, name))
  assert source.objective().norm_pixels == norm
  same_predictions(model, source.changed(num_heads=HEADS))


@pytest.mark.parametrize(
  'keys, config',
  [
    ({'statistics': ((0.5,) * 3,) * 2}, {}),
    ({'fixed': False}, {}),
    ({}, {'hidden_act': 'quick_gelu'}),
  ],
)
def test_other_decoders_are_left_out(tmp_path, caplog, keys, config):
  """The encoder opens, and a warning says why the decoder does not."""
  source = pretrained.find(written(tmp_path, reference(**config), **keys))
  assert 'left out a decoder' in caplog.text
  assert 'decoder' not in source.abstract_params()
  assert not source.objective().reconstructs


def experiment(**changes):
  """Returns a run of the objective `mae` with the encoder's sizes."""
  sizes = dict(patch_size=PATCH, width=WIDTH, depth=DEPTH, mlp_dim=2 * WIDTH)
  config = completed(
    model=dict(name='vit', dtype='float32', num_heads=HEADS, **sizes),
    objective=dict(name='mae', decoder=DECODER | changes),
    image_size=(SIZE, SIZE),
    num_classes=0,
  )
  return Experiment.build(config, jax.devices()[:1])


@pytest.mark.slow
def test_pretraining_is_continued_with_the_decoder(tmp_path, caplog):
  """Arrays of a decoder of another width do not fit."""
  source = pretrained.find(written(tmp_path, reference()))
  same, other = experiment(), experiment(width=32)
  params = source.load(source.abstract_params(same.mesh))
  with jax.set_mesh(same.mesh):
    started = transfer.start(source, same, None, Numbered(1))
    wider = transfer.start(source, other, None, Numbered(1))
  jax.tree.map(np.testing.assert_array_equal, started, params)
  jax.tree.map(np.testing.assert_array_equal, wider['model'], params['model'])
  assert wider['decoder']['mask'].shape == (1, 1, 32)
  assert 'decoder/mask (1, 1, 64) (in the model: (1, 1, 32))' in caplog.text
