"""Packaging; the ranges of requirements.txt are the dependencies."""

import pathlib
import shutil

import setuptools
from setuptools.command.build_py import build_py

HERE = pathlib.Path(__file__).parent


def requirements(name: str) -> list[str]:
  """Lines of a requirements file that name a package."""
  lines = (HERE / name).read_text().splitlines()
  return [line for line in lines if line and not line.startswith(('#', '-'))]


class Build(build_py):
  """Puts configs and launch scripts into what is installed."""

  def run(self) -> None:
    super().run()
    if self.editable_mode:  # a checkout has them
      return
    for name in ('configs', 'launch'):
      target = pathlib.Path(self.build_lib) / 'vit_jax' / 'shipped' / name
      shutil.rmtree(target, ignore_errors=True)
      left_out = shutil.ignore_patterns('__pycache__')
      shutil.copytree(HERE / name, target, ignore=left_out)


setuptools.setup(
  name='vit_jax',
  version='0.1.0',
  description='Pre-training of Vision Transformers in JAX on TPU pods.',
  long_description=(HERE / 'README.md').read_text(),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  python_requires='>=3.11',
  packages=setuptools.find_namespace_packages(include=['vit_jax*']),
  cmdclass={'build_py': Build},
  package_data={
    'vit_jax': [
      'commit.txt',
      'analysis/report.html',
      'arrays/gpus.csv',
      'arrays/tpus.csv',
      'data/sources/objectnet.json',
      'plan/gpu_target.txt',
      'prepare/listing.txt',
      'weights/formats/huggingface_types.json',
      'weights/*.csv',
      'weights/formats/*.csv',
    ]
  },
  install_requires=requirements('requirements.txt'),
  extras_require={
    'tpu': ['jax[tpu]'],
    'gpu': ['jax[cuda13]'],
    # XLA's compilers for TPUs and GPUs that are not there.
    'plan': ['libtpu'],
    'plan-gpu': ['jax[cuda12-local]', 'nvidia-cudnn-cu12>=9.8'],
    'huggingface': ['datasets>=3', 'huggingface_hub>=0.34'],
    # Tokenizers of texts.
    'text': ['sentencepiece>=0.2', 'tokenizers>=0.20'],
    # Perceptual hashes, for check_data --against.
    'duplicates': ['imagehash>=4.3.1'],
    # TIFF files compressed by LZW, Zstandard, JPEG and others.
    'tiff': ['imagecodecs'],
    # Preparing data sets of TFDS, and SavedModels.
    'tensorflow': requirements('requirements-tensorflow.txt'),
    'test': [
      *requirements('requirements-test.txt'),
      *requirements('requirements-peers.txt'),
      *requirements('requirements-tensorflow.txt'),
    ],
  },
)
