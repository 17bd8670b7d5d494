"""Where preview may write its picture."""

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
def test_pictures_that_cannot_be_written(monkeypatch, tmp_path, out, words):
  """One message, before anything is computed."""
  monkeypatch.chdir(tmp_path)
  values = types.SimpleNamespace(images=1, start_step=0, out=out, config=None)
  monkeypatch.setattr(preview.flags, 'FLAGS', values)
  monkeypatch.setattr(preview, 'run', lambda *a: pytest.fail('computed'))
  with pytest.raises(UserError) as error:
    preview.main([])
  for word in (f'--out={out}', *words):
    assert word in str(error.value)
