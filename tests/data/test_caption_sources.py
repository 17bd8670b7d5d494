"""Tests of captions from every source, with the settings of docs/text.md."""

import csv
import json

import contract
import numpy as np
import pytest
from test_captions import TOY
from test_sources_tar import write_tar

from vit_jax.config import schema
from vit_jax.data.augment import captions

TEXTS = [['a photo of a cat', 'a good dog'], ['one truck'], ['the ship']]
ROWS = [(contract.png(i), texts) for i, texts in enumerate(TEXTS)]


def in_tar(folder, ending):
  members = []
  for i, (image, texts) in enumerate(ROWS):
    content = texts[0] if ending == 'txt' else json.dumps({'caption': texts[0]})
    members += [(f'{i}.png', image), (f'{i}.{ending}', content.encode())]
  write_tar(folder / 'train-0.tar', members)
  source = dict(name='tar', path=str(folder), label_key=None, others=(ending,))
  return source, dict(key=ending)


def in_txt(folder):
  return in_tar(folder, 'txt')


def in_json(folder):
  source, keys = in_tar(folder, 'json')
  return source, keys | dict(json_key='caption')


def in_manifest(folder):
  with (folder / 'list.csv').open('w') as file:
    table = csv.writer(file)
    table.writerow(('image', 'text'))
    for i, (image, texts) in enumerate(ROWS):
      (folder / f'{i}.png').write_bytes(image)
      table.writerow((f'{i}.png', texts[0]))
  path = str(folder / 'list.csv')
  return dict(name='manifest', path=path, texts=('text',)), dict(key='text')


def in_huggingface(folder):
  hf = pytest.importorskip('datasets')
  hf.disable_progress_bars()
  kinds = dict(image=hf.Image(), text=hf.List(hf.Value('string')))
  rows = [
    dict(image=dict(bytes=image, path=None), text=texts)
    for image, texts in ROWS
  ]
  table = hf.Dataset.from_list(rows, features=hf.Features(kinds))
  table.save_to_disk(folder / 'saved')
  source = dict(name='huggingface', path=str(folder / 'saved'), label_key=None)
  return source | dict(others=('text',)), dict(key='text')


def in_tfds(folder):
  """Writes a data set with the features of coco_captions that are read."""
  import tensorflow_datasets as tfds

  kinds = tfds.features

  class Pairs(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version('1.0.0')

    def _info(self):
      text = {'id': np.int64, 'text': kinds.Text()}
      image = kinds.Image(encoding_format='png')
      features = {'image': image, 'captions': kinds.Sequence(text)}
      return tfds.core.DatasetInfo(
        builder=self, features=kinds.FeaturesDict(features)
      )

    def _split_generators(self, dl_manager):
      return {'train': self._generate_examples()}

    def _generate_examples(self):
      for i, (image, texts) in enumerate(ROWS):
        file = folder / f'{i}.png'
        file.write_bytes(image)
        pairs = [dict(id=i, text=text) for text in texts]
        yield i, dict(image=file, captions=pairs)

  builder = Pairs(data_dir=str(folder), file_format='array_record')
  builder.download_and_prepare()
  source = dict(name='tfds', dataset='pairs', data_dir=str(folder))
  source |= dict(label_key=None, others=('captions/text',))
  return source, dict(key='captions/text')


@pytest.mark.parametrize(
  'write', [in_txt, in_json, in_manifest, in_huggingface, in_tfds]
)
def test_captions_of_a_source_become_tokens(tmp_path, monkeypatch, write):
  """All of an image, or the only one that the format has."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  section, keys = write(tmp_path)
  source = schema.build('source', section, 'train')
  keys |= dict(tokenizer=TOY, length=8, vocabulary=45)
  several = captions.EvalTransform((4, 4), captions_per_image=2, **keys)
  plain = captions.TrainTransform((4, 4), **keys)
  assert len(source) == 3
  found = {}
  for i in range(3):
    example, rng = source[i], np.random.default_rng(i)
    values = several(example)
    texts = plain.captions(example)
    rows = [plain.tokens(text).tolist() for text in texts]
    assert values['tokens'][: len(texts)].tolist() == rows
    assert values['captions'] == len(texts)
    assert plain(example, rng)['tokens'].tolist() in rows
    found[example['image']] = texts
  many = write in (in_huggingface, in_tfds)
  assert {*map(tuple, found.values())} == {
    tuple(texts if many else texts[:1]) for texts in TEXTS
  }
