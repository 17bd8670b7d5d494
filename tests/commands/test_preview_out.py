"""Tests of the output path of preview."""

import types

import pytest

from vit_jax import preview
from vit_jax.errors import UserError


@pytest.mark.parametrize(
  'out, words',
  [
    ('grid', ["'nothing'", '.png']),
    ('grid.', ["'.'", '.png']),
    ('grid.docx', ["'.docx'", '.png']),
    ('absent/grid.png', ['no directory absent']),
  ],
)
def test_wrong_output_paths_are_refused(monkeypatch, tmp_path, out, words):
  """The message comes before anything is computed."""
  monkeypatch.chdir(tmp_path)
  values = types.SimpleNamespace(images=1, start_step=0, out=out, config=None)
  monkeypatch.setattr(preview.flags, 'FLAGS', values)
  monkeypatch.setattr(preview, 'run', lambda *a: pytest.fail('computed'))
  with pytest.raises(UserError) as error:
    preview.main([])
  for word in (f'--out={out}', *words):
    assert word in str(error.value)
