"""Tests of tokenizers and of transforms with captions."""

import pathlib

import numpy as np
import pytest

from vit_jax.data import tokens
from vit_jax.data.augment import captions
from vit_jax.data.images.headers import DecodeError
from vit_jax.errors import UserError

TOY = str(
  pathlib.Path(__file__).parents[2] / 'configs' / 'lit_toy_tokenizer.json'
)
TEXTS = dict(tokenizer=TOY, length=6, vocabulary=45)
IMAGE = np.zeros((8, 8, 3), np.uint8)


def train(**keys):
  return captions.TrainTransform((8, 8), **TEXTS | keys)


def test_a_text_ends_also_if_it_is_cut():
  """Lower case, the end (1) after the text, and padding with it."""
  row = train().tokens
  assert row('A photo').tolist() == [2, 3, 1, 1, 1, 1]
  assert row('a photo a photo a photo').tolist() == [2, 3, 2, 3, 2, 1]


def test_presets_differ_in_start_end_and_padding(tmp_path):
  from tokenizers import Tokenizer, models, pre_tokenizers

  words = ['<pad>', '<eos>', 'cat', '<|startoftext|>', '<|endoftext|>', '?']
  vocabulary = {word: number for number, word in enumerate(words)}
  model = Tokenizer(models.WordLevel(vocabulary, unk_token='?'))
  model.pre_tokenizer = pre_tokenizers.Whitespace()
  path = str(tmp_path / 'tokenizer.json')
  model.save(path)
  siglip2, clip = (tokens.load(path, name) for name in ('siglip2', 'clip'))
  assert siglip2('Cat cat', 5).tolist() == [2, 2, 1, 0, 0]
  assert clip('Cat cat', 5).tolist() == [3, 2, 2, 4, 4]
  assert clip('cat ' * 9, 5).tolist() == [3, 2, 2, 2, 4]
  with pytest.raises(UserError, match=r"'</s>'.*'siglip'"):
    tokens.load(path, 'siglip')


def test_a_sentencepiece_model_is_read(tmp_path):
  import sentencepiece

  text = tmp_path / 'text'
  text.write_text('\n'.join(['a photo of a cat', 'a photo of a dog'] * 20))
  prefix = str(tmp_path / 'pieces')
  sentencepiece.SentencePieceTrainer.Train(
    input=str(text), model_prefix=prefix, vocab_size=14, minloglevel=2
  )
  load = tokens.load(f'{prefix}.model', 'siglip')
  model = sentencepiece.SentencePieceProcessor(f'{prefix}.model')
  end = model.PieceToId('</s>')
  expected = [*model.EncodeAsIds('a photo of a cat'), end]
  assert load('A photo of a CAT', 40).tolist()[: len(expected)] == expected


def test_tokenizers_that_do_not_fit_are_refused():
  with pytest.raises(UserError, match=r'no_such.*gs://t5-data/vocabs'):
    tokens.load('no_such.model', 'siglip')
  with pytest.raises(UserError, match='vocabulary is 10'):
    train(vocabulary=10).tokens('a photo of a truck')


OF_CLASSES = dict(templates=('a {}', 'one {}'), classes=('cat', 'dog'))


@pytest.mark.parametrize(
  'keys, example, words',
  [
    ({}, {'text': ' '}, 'caption'),
    ({}, {'text': []}, 'caption'),
    ({}, {'text': ['a cat', None]}, 'caption'),
    ({}, {'text': b'\xff'}, 'caption'),
    (dict(json_key='caption'), {'text': b'{}'}, 'caption'),
    (dict(json_key='caption'), {'text': b'{'}, 'caption'),
    (OF_CLASSES, {'label': 2}, 'label 2; allowed: 0 to 1'),
    (OF_CLASSES, {'label': -1}, 'label -1; allowed: 0 to 1'),
  ],
)
def test_an_example_without_a_caption_is_a_bad_record(keys, example, words):
  with pytest.raises(DecodeError, match=words):
    train(**keys).captions(example)


def test_one_caption_is_drawn_by_the_generator_of_the_position():
  """All are drawn, and the same generator draws the same; pixels are equal."""
  example = {'image': IMAGE, 'label': 0, 'text': ['cat', 'dog', 'ship']}
  seen = set()
  for seed in range(30):
    rows = [train()(example, np.random.default_rng(seed)) for _ in range(2)]
    assert (rows[0]['tokens'] == rows[1]['tokens']).all()
    seen.add(int(rows[0]['tokens'][0]))
  assert len(seen) == 3


def test_captions_of_classes_are_made_from_templates():
  transform = train(**OF_CLASSES)
  assert transform.captions({'label': 1}) == ['a dog', 'one dog']
  with pytest.raises(UserError, match='but not label'):
    transform.captions({'image': IMAGE})
  with pytest.raises(UserError, match='give both'):
    train(templates=('a {}',))


@pytest.mark.parametrize('most, found', [(3, 2), (1, 1)])
def test_evaluation_has_the_first_captions_and_their_number(most, found):
  transform = captions.EvalTransform((8, 8), captions_per_image=most, **TEXTS)
  texts = ['a cat', 'a dog']
  values = transform({'image': IMAGE, 'label': 0, 'text': texts})
  assert values['captions'] == found
  expected = np.zeros((most, 6), int)
  expected[:found] = [transform.tokens(text) for text in texts[:found]]
  np.testing.assert_array_equal(values['tokens'], expected)
  plain = captions.EvalTransform((8, 8), **TEXTS)
  assert {*plain({'image': IMAGE, 'label': 0})} == {'image', 'label'}
