"""Tests of DINOv3's weights with Hugging Face's names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import safetensors.numpy
from references import torch, transformers

from vit_jax import load_pretrained
from vit_jax.arrays.pixels import IMAGENET
from vit_jax.errors import UserError
from vit_jax.models.vit import Model
from vit_jax.weights import pretrained


@pytest.mark.parametrize('gated', [False, True])
def test_round_trip(tmp_path, gated):
  """The arrays are equal, and so are the results of transformers."""
  changes = dict(num_register_tokens=3, use_gated_mlp=gated, rope_theta=50.0)
  changes['hidden_act'] = 'silu' if gated else 'gelu'
  reference = references.huggingface('DINOv3ViT', 'Model', **changes)
  first, second = str(tmp_path / 'first'), str(tmp_path / 'second')
  reference.save_pretrained(first)
  model, params = load_pretrained(first)
  assert (model.rope, model.rope_base, model.qkv_bias) == (
    'centered',
    50,
    'query_value',
  )
  pretrained.save(f'huggingface:{second}', params, pretrained.find(first).about)
  arrays = [
    safetensors.numpy.load_file(f'{path}/model.safetensors')
    for path in (first, second)
  ]
  mask = 'embeddings.mask_token'  # which is not used, and not kept
  assert arrays[0].pop(mask).shape == arrays[1].pop(mask).shape
  assert arrays[0].keys() == arrays[1].keys()
  for name, array in arrays[0].items():
    np.testing.assert_allclose(arrays[1][name], array, atol=1e-6)
  again = transformers.DINOv3ViTModel.from_pretrained(second).eval()
  assert again.config.use_gated_mlp == gated
  pixels = torch.from_numpy(references.images().transpose(0, 3, 1, 2))
  with torch.no_grad():
    expected, found = (each(pixels)[0].numpy() for each in (reference, again))
  np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize('name', ['small', 'small_plus'])
def test_files_of_the_authors(tmp_path, caplog, name):
  """Masked biases of keys are not used; a teacher is next to its head."""
  width, patch = 32, 4
  reference = references.timm_vit(
    f'vit_{name}_patch16_dinov3_qkvb',
    patch_size=patch,
    num_classes=0,
    global_pool='token',
    dynamic_img_size=True,
  )
  teacher = {
    'backbone.mask_token': torch.ones(1, width),
    'backbone.rope_embed.periods': torch.ones(2),
    'backbone.local_cls_norm.weight': torch.ones(width),
    'dino_head.mlp.0.weight': torch.ones(3, 3),
  }
  for key, array in reference.state_dict().items():
    for timms, authors in (
      ('reg_token', 'storage_tokens'),
      ('gamma_1', 'ls1.gamma'),
      ('gamma_2', 'ls2.gamma'),
      ('mlp.fc1_g', 'mlp.w1'),
      ('mlp.fc1_x', 'mlp.w2'),
    ):
      key = key.replace(timms, authors)
    if 'plus' in name:
      key = key.replace('mlp.fc2', 'mlp.w3')
    teacher[f'backbone.{key}'] = array
  for key in [key for key in teacher if key.endswith('attn.q_bias')]:
    query = teacher.pop(key)
    value = teacher.pop(key.replace('q_bias', 'v_bias'))
    bias = key.replace('q_bias', 'qkv.bias')
    teacher[bias] = torch.cat([query, torch.ones(width), value])
    mask = torch.ones(3, width)
    mask[1] = 0
    teacher[f'{bias}_mask'] = mask.reshape(-1)
  path = str(tmp_path / 'dinov3_vits16_pretrain_lvd1689m-08c60483.pth')
  torch.save({'teacher': teacher}, path)
  for size, limit in (((16, 16), 1e-5), ((12, 20), 1e-4)):
    references.same_results(path, reference, size, IMAGENET, limit)
  assert not caplog.records


def test_models_of_this_package_are_written(tmp_path):
  """`rope2d` is the rotation of DINOv3; what it lacks is refused."""
  sizes = dict(patch_size=4, width=32, depth=2, mlp_dim=64, num_heads=2)
  section = dict(sizes, position='rope2d', dtype='float32', gelu='exact')
  about = dict(
    model=section,
    objective=dict(name='supervised'),
    num_classes=0,
    image_size=[16, 16],
    preprocess={},
    class_names=[],
  )
  images = jnp.asarray(references.images())
  model = Model(0, **section)
  params = model.init(jax.random.key(0), images)['params']
  path = str(tmp_path / 'out')
  pretrained.save(f'huggingface:{path}', params, about)
  theirs = transformers.DINOv3ViTModel.from_pretrained(path).eval()
  pixels = torch.from_numpy(references.images().transpose(0, 3, 1, 2).copy())
  with torch.no_grad():
    expected = theirs(pixels).pooler_output.numpy()
  ours = model.apply({'params': params}, images, None, method='predict')
  np.testing.assert_allclose(ours['features'], expected, atol=1e-5)
  other = about | {'model': section | dict(pool='gap')}
  with pytest.raises(UserError, match="pool 'gap'"):
    pretrained.save(f'huggingface:{tmp_path}/other', params, other)
