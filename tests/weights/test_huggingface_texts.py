"""Tests of both towers of CLIP and SigLIP against transformers."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from PIL import Image
from references import SIZE, SIZES, huggingface, images, torch

from vit_jax import load_pretrained, predict
from vit_jax.arrays.pixels import NONE
from vit_jax.data.augment import captions
from vit_jax.errors import UserError
from vit_jax.models import text as text_lib
from vit_jax.weights import pretrained
from vit_jax.weights.patch_embedding import CLIP

LENGTH, VOCABULARY = 9, 21
TEXTS = ['a photo of a cat', 'a Dog', 'a photo of a cat and a photo of a dog']
TOWER = dict(
  hidden_size=32,
  num_hidden_layers=2,
  num_attention_heads=4,
  intermediate_size=64,
  vocab_size=VOCABULARY,
  max_position_embeddings=LENGTH,
)
# {class: keys of the config, keys of the text tower, mean and std}
MODELS = {
  'CLIPModel': (
    dict(projection_dim=24),
    dict(eos_token_id=VOCABULARY - 1, bos_token_id=VOCABULARY - 2),
    CLIP,
  ),
  'SiglipModel': ({}, dict(projection_size=32, hidden_act='gelu'), NONE),
}


def model_in(folder, name, **text):
  """Writes a model with a tokenizer of words; returns that of transformers."""
  from tokenizers import Tokenizer, models, pre_tokenizers

  keys, own, _ = MODELS[name]
  tower = TOWER | own | text
  reference = huggingface(name, vision_config=SIZES, text_config=tower, **keys)
  reference.save_pretrained(folder)
  words = ['?', '</s>', 'a', 'photo', 'of', 'cat', 'dog']
  words += [f'unused{i}' for i in range(VOCABULARY - 2 - len(words))]
  words += ['<|startoftext|>', '<|endoftext|>']
  vocabulary = {word: number for number, word in enumerate(words)}
  model = Tokenizer(models.WordLevel(vocabulary, unk_token='?'))
  model.pre_tokenizer = pre_tokenizers.Whitespace()
  model.save(str(folder / 'tokenizer.json'))
  return reference


def tokens_of(path):
  """Returns the tokens of `TEXTS`, a tensor."""
  transform = pretrained.find(path).description.transform()
  assert isinstance(transform, captions.EvalTransform)
  rows = np.stack([transform.tokens(text) for text in TEXTS])
  return torch.from_numpy(rows.astype(np.int64))


@pytest.mark.parametrize('name', MODELS)
def test_logits_of_texts_equal_those_of_transformers(tmp_path, name):
  """With texts of several lengths, of which the last one is cut."""
  reference, path = model_in(tmp_path, name), str(tmp_path)
  x, tokens = images(), tokens_of(path)
  assert len({*(tokens == 20).sum(1).tolist()}) > 1 or name == 'SiglipModel'
  other = dict(mean=(0.25, 0.5, 0.75), std=(0.5, 0.5, 0.25))
  for options in ({}, other):  # the statistics can be replaced
    statistics = options.values() or MODELS[name][2]
    mean, std = (np.array(values) for values in statistics)
    pixels = (((x + 1) / 2 - mean) / std).transpose(0, 3, 1, 2)
    with torch.no_grad():
      expected = reference(
        input_ids=tokens, pixel_values=torch.from_numpy(np.float32(pixels))
      ).logits_per_image.numpy()
    found = load_pretrained(path, **options).text_logits(x, TEXTS)
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)

  file = str(tmp_path / 'photo.png')
  Image.fromarray(np.uint8((x[0] + 1) * 127.5)).save(file)
  [found] = predict.run(path, [file], predict.Request(), TEXTS)
  loaded = load_pretrained(path)
  image = loaded.preprocess(np.array(Image.open(file)))
  of_logits = scipy.special.softmax
  if name == 'SiglipModel':
    of_logits = scipy.special.expit
  probabilities = of_logits(loaded.text_logits(image[None], TEXTS)[0])
  assert dict(found.top) == pytest.approx(
    dict(zip(TEXTS, probabilities, strict=True)), rel=1e-5
  )


@pytest.mark.parametrize('pool', ['map', 'max'])
def test_other_poolings_equal_those_of_transformers(tmp_path, pool):
  """The attention pooling of SigLIP's images, and a maximum, for texts."""
  gelu = dict(hidden_act='gelu_pytorch_tanh')  # as in the image tower
  reference, path = model_in(tmp_path, 'SiglipModel', **gelu), str(tmp_path)
  source = pretrained.find(path)
  params = source.load(source.abstract_params())
  section = {**source.description.objective['text']} | {'pool': pool}
  text, tokens = text_lib.Text(text_lib.Config(**section), 32), tokens_of(path)
  own = params['text']
  if pool == 'map':
    own = own | {'map': params['model']['map']}
  with torch.no_grad():
    hidden = reference.text_model(tokens).last_hidden_state
    pooled = hidden.max(1).values
    if pool == 'map':
      pooled = reference.vision_model.head(hidden)
    expected = reference.text_model.head(pooled).numpy()
  found = text.apply({'params': own}, jnp.array(tokens, np.int32))
  limit = 1e-5 * np.abs(expected).max()
  np.testing.assert_allclose(found, expected, atol=limit)


def test_weights_without_a_text_tower_are_named(tmp_path):
  huggingface('SiglipVisionModel').save_pretrained(tmp_path)
  loaded = load_pretrained(str(tmp_path))
  with pytest.raises(UserError, match="objective 'contrastive'"):
    loaded.text_logits(images(SIZE), TEXTS)


def test_an_end_that_is_not_the_highest_token_leaves_the_image_tower(tmp_path):
  """CLIP's library then takes another token than the pooling 'end'."""
  model_in(tmp_path, 'CLIPModel', eos_token_id=5)
  found = pretrained.find(str(tmp_path)).description
  assert found.objective['name'] == 'supervised'
  assert found.num_classes == 24
