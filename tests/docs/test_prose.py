"""Tests of the language of docstrings, messages and documents."""

import ast
import pathlib
import re

import pytest

import vit_jax

ROOT = pathlib.Path(vit_jax.__file__).parent.parent
# First words of docstrings that do not start with a verb.
NO_VERB = set(
  'a all an by for from how if in its of that the their this those to what '
  'when where whether which who whose with'.split()
)
# Words to avoid; CONTRIBUTING.md asks for the field's terms.
FOREIGN = re.compile(
  r'\b(anew|mend(s|ed|ing)?|likewise|(is|are) told|told by|strangers?|'
  r'set aside|that which)\b',
  re.IGNORECASE,
)


def _python(*tops):
  """Returns the Python files below some directories of the repository."""
  return sorted(path for top in tops for path in (ROOT / top).rglob('*.py'))


def _functions(tree):
  """Yields (name, docstring) of functions; a property may be a noun."""
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
      decorators = ' '.join(ast.unparse(d) for d in node.decorator_list)
      if 'property' not in decorators:
        yield node.name, text


@pytest.mark.slow
def test_docstrings_of_functions_start_with_a_verb():
  """Docstrings of tests, which state a property, are left out."""
  wrong, count = [], 0
  for path in _python('vit_jax', 'tests', 'benchmarks'):
    for name, text in _functions(ast.parse(path.read_text())):
      if name.startswith('test_'):
        continue
      count += 1
      first = re.match(r'\W*(\w*)', text)
      assert first
      if first[1].lower() in NO_VERB:
        wrong.append(f'{path.relative_to(ROOT)} {name}: {text.splitlines()[0]}')
  assert count > 1_000 and not wrong


def test_no_words_to_avoid():
  """Docstrings, comments, messages and documents are searched."""
  pages = [*ROOT.glob('docs/*.md'), *ROOT.glob('*.md')]
  pages += [*ROOT.glob('benchmarks/**/*.md'), ROOT / 'pyproject.toml']
  scripts = [*(ROOT / 'launch').iterdir()]
  files = _python('vit_jax', 'configs', 'tests', 'benchmarks')
  files.remove(pathlib.Path(__file__))
  found = [
    f'{path.relative_to(ROOT)}:{number}: {line.strip()}'
    for path in sorted([*pages, *scripts, *files])
    for number, line in enumerate(path.read_text().splitlines(), 1)
    if FOREIGN.search(line)
  ]
  assert len(files) > 200 and not found
