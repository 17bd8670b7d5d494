"""Tests of what every kind of source has: images with and without labels,
masks and captions. A row of `SOURCES` writes the same examples in its format.

tests/data/test_sources_*.py test what a single kind of source has.
"""

import csv
import json
from typing import NamedTuple

import contract
import cv2
import numpy as np
import pytest
from minimal_config import completed, with_outputs
from test_captions import TOY
from test_sources_tar import write_tar

from vit_jax.config import schema
from vit_jax.data.augment import captions, segments
from vit_jax.data.storage.class_folders import UNLABELLED
from vit_jax.errors import UserError
from vit_jax.training import data

CLASSES = ['cat', 'dog']
TEXTS = [['a photo of a cat', 'a good dog'], ['one truck'], ['the ship']]
IMAGES = [contract.png(i) for i in range(len(TEXTS))]
LABELS = [1, 0, 1]
# 0 is ignored, 1 and 2 are the classes 0 and 1.
MASKS = np.random.default_rng(0).integers(0, 3, (len(TEXTS), 3, 4), np.uint8)
FILES = [cv2.imencode('.png', mask)[1].tobytes() for mask in MASKS]


class Written(NamedTuple):
  """Examples in the format of a source.

  Attributes:
    section: section of the source.
    unlabelled: keys with which it has no labels.
    masks: keys with which it has masks, and the key of the mask.
    texts: keys with which it has captions, and those of the transform.
    many: whether it has all captions of an image.
  """

  section: dict
  unlabelled: dict
  masks: tuple[dict, str] | None = None
  texts: tuple[dict, dict] | None = None
  many: bool = False


def folder(root):
  for i, image in enumerate(IMAGES):
    for name, content in (
      (f'labelled/{CLASSES[LABELS[i]]}', image),
      (f'masks/{CLASSES[LABELS[i]]}', FILES[i]),
      ('plain', image),
    ):
      (root / name).mkdir(parents=True, exist_ok=True)
      (root / name / f'{i}.png').write_bytes(content)
  (root / 'plain/notes.txt').write_text('not an image')
  return Written(
    dict(name='folder', path=f'{root}/labelled'),
    dict(path=f'{root}/plain'),
    (dict(masks=f'{root}/masks'), 'mask'),
  )


def csv_list(root):
  rows = [['image', 'label', 'mask', 'text']]
  for i, image in enumerate(IMAGES):
    (root / f'{i}.png').write_bytes(image)
    (root / f'mask{i}.png').write_bytes(FILES[i])
    label = CLASSES[LABELS[i]]
    rows.append([f'{i}.png', label, f'mask{i}.png', TEXTS[i][0]])
  for name, width in (('list', 4), ('plain', 1)):
    with (root / f'{name}.csv').open('w') as file:
      csv.writer(file).writerows(row[:width] for row in rows)
  return Written(
    dict(name='manifest', path=f'{root}/list.csv'),
    dict(path=f'{root}/plain.csv'),
    (dict(files=('mask',)), 'mask'),
    (dict(texts=('text',)), dict(key='text')),
  )


def json_lines(root):
  for name in ('list', 'plain'):
    lines = []
    for i, image in enumerate(IMAGES):
      (root / f'{i}.png').write_bytes(image)
      line = {'image': f'{i}.png', 'split': 'train'}
      labelled = {'label': CLASSES[LABELS[i]]} if name == 'list' else {}
      lines.append(json.dumps(line | labelled))
    (root / f'{name}.jsonl').write_text('\n'.join(lines))
  section = dict(name='manifest', path=f'{root}/list.jsonl')
  return Written(section, dict(path=f'{root}/plain.jsonl'))


def tar(root, ending='txt'):
  members = []
  for i, image in enumerate(IMAGES):
    members += [
      (f'{i}.png', image),
      (f'{i}.cls', b'%d' % LABELS[i]),
      (f'{i}.seg.png', FILES[i]),
      (f'{i}.txt', f' {TEXTS[i][0]}\n'.encode()),
      (f'{i}.json', json.dumps({'caption': TEXTS[i][0]}).encode()),
    ]
  write_tar(root / 'train-0.tar', members)
  (root / 'classes.txt').write_text('\n'.join(CLASSES))
  json_key = dict(json_key='caption') if ending == 'json' else {}
  return Written(
    dict(name='tar', path=str(root), class_map=f'{root}/classes.txt'),
    dict(label_key=None, class_map=None),
    (dict(others=('seg.png',)), 'seg.png'),
    (dict(others=(ending,)), dict(key=ending, **json_key)),
  )


def tar_with_json(root):
  return tar(root, 'json')


def huggingface(root):
  hf = pytest.importorskip('datasets')
  hf.disable_progress_bars()
  kinds = dict(
    image=hf.Image(),
    label=hf.ClassLabel(names=CLASSES),
    mask=hf.Image(),
    text=hf.List(hf.Value('string')),
  )
  rows = [
    dict(
      image=dict(bytes=image, path=None),
      label=LABELS[i],
      mask=dict(bytes=FILES[i], path=None),
      text=TEXTS[i],
    )
    for i, image in enumerate(IMAGES)
  ]
  table = hf.Dataset.from_list(rows, features=hf.Features(kinds))
  table.save_to_disk(root / 'saved')
  return Written(
    dict(name='huggingface', path=f'{root}/saved'),
    dict(label_key=None),
    (dict(others=('mask',)), 'mask'),
    (dict(others=('text',)), dict(key='text')),
    many=True,
  )


def tfds(root):
  """Writes the features that are read of coco_captions, and a mask."""
  import tensorflow_datasets as lib

  kinds = lib.features

  class Pairs(lib.core.GeneratorBasedBuilder):
    VERSION = lib.core.Version('1.0.0')

    def _info(self):
      features = dict(
        image=kinds.Image(encoding_format='png'),
        label=kinds.ClassLabel(names=CLASSES),
        mask=kinds.Image(shape=(None, None, 1), encoding_format='png'),
        captions=kinds.Sequence({'id': np.int64, 'text': kinds.Text()}),
      )
      return lib.core.DatasetInfo(
        builder=self, features=kinds.FeaturesDict(features)
      )

    def _split_generators(self, dl_manager):
      return {'train': self._generate_examples()}

    def _generate_examples(self):
      for i, image in enumerate(IMAGES):
        file = root / f'{i}.png'
        file.write_bytes(image)
        texts = [dict(id=i, text=text) for text in TEXTS[i]]
        mask = MASKS[i][..., None]
        yield i, dict(image=file, label=LABELS[i], mask=mask, captions=texts)

  Pairs(data_dir=str(root), file_format='array_record').download_and_prepare()
  return Written(
    dict(name='tfds', dataset='pairs', data_dir=str(root)),
    dict(label_key=None),
    (dict(others=('mask',)), 'mask'),
    (dict(others=('captions/text',)), dict(key='captions/text')),
    many=True,
  )


SOURCES = [folder, csv_list, json_lines, tar, tar_with_json, huggingface, tfds]


@pytest.fixture(
  scope='module', params=SOURCES, ids=lambda write: write.__name__
)
def written(request, tmp_path_factory):
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.mktemp('cache')))
    yield request.param(tmp_path_factory.mktemp('source'))


def opened(written, more):
  """Returns a source, and for each example the index of its image."""
  source = schema.build('source', written.section | more, 'train')
  numbers = [IMAGES.index(source[i]['image']) for i in range(len(source))]
  assert sorted(numbers) == [*range(len(IMAGES))]
  return source, numbers


def test_images_and_labels(written):
  source, numbers = opened(written, {})
  contract.check(source, [(IMAGES[i], LABELS[i]) for i in numbers], [])
  assert source.class_names == CLASSES


def test_images_without_labels(written):
  """Their class is named, so that only some objectives train on them."""
  source, numbers = opened(written, written.unlabelled)
  contract.check(source, [(IMAGES[i], 0) for i in numbers], [])
  assert source.class_names == [UNLABELLED]
  section = written.section | written.unlabelled
  train = {'train.num_examples': len(IMAGES), 'source': section}
  config = completed(num_classes=0, **train)
  assert len(data.open_train(with_outputs(config))) == len(source)
  config.num_classes = 10
  with pytest.raises(UserError, match='no labels, but a classifier'):
    data.open_train(with_outputs(config))


def test_masks_become_classes(written):
  """They do by a table: 0 is ignored."""
  if not written.masks:
    pytest.skip('has no masks')
  more, key = written.masks
  source, numbers = opened(written, more)
  transform = segments.EvalTransform(
    (3, 4), classes=2, key=key, table=(255, 0, 1), resize='squash'
  )
  for i, number in enumerate(numbers):
    found = transform(source[i], None)['segments']
    np.testing.assert_array_equal(found, MASKS[number].astype(int) - 1)


def test_captions_become_tokens(written):
  """All of an image, or the only one that the format has."""
  if not written.texts:
    pytest.skip('has no captions')
  more, keys = written.texts
  source, numbers = opened(written, more)
  keys = keys | dict(tokenizer=TOY, length=8, vocabulary=45)
  several = captions.EvalTransform((4, 4), captions_per_image=2, **keys)
  plain = captions.TrainTransform((4, 4), **keys)
  for i, number in enumerate(numbers):
    texts = TEXTS[number] if written.many else TEXTS[number][:1]
    assert plain.captions(source[i]) == texts
    rows = [plain.tokens(text).tolist() for text in texts]
    values = several(source[i])
    assert values['tokens'][: len(texts)].tolist() == rows
    assert values['captions'] == len(texts)
    rng = np.random.default_rng(i)
    assert plain(source[i], rng)['tokens'].tolist() in rows
