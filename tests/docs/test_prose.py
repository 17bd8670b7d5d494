"""Tests of the language of docstrings, messages and documents."""

import ast
import importlib.util
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


# Sections of the config, whose keys are in backticks like names of code, and
# other names before a dot
SECTIONS = set(
  'augment checkpoint config evals log mesh model objective optimizer '
  'preprocess reader recovery schedule source train'.split()
)
OTHERS = {'DirEntry', 'FILE', 'compiled', 'key', 'my_lab', 'nn', 'np', 'ops'}
DOTTED = re.compile(
  r'`(?:vit_jax\.)?([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`'
)
FILE = re.compile(
  r'.*\.(bin|csv|html|jsonl?|npz|png|py|safetensors|stablehlo|tar|gz|txt)'
)


def _names(tree):
  """Returns the names that a module or class defines."""
  found = set()
  for node in ast.walk(tree):
    match node:
      case ast.FunctionDef() | ast.ClassDef():
        found.add(node.name)
      case ast.Name(ctx=ast.Store()):
        found.add(node.id)
      case ast.Attribute(ctx=ast.Store()):
        found.add(node.attr)
      case ast.ImportFrom() | ast.Import():
        found |= {name.asname or name.name for name in node.names}
  return found


@pytest.mark.slow
def test_names_in_docstrings_exist():
  """In `MODULE.NAME` and `CLASS.NAME`, both do; parameters are not followed."""
  trees = {path: ast.parse(path.read_text()) for path in _python('vit_jax')}
  defined, bases = {}, {}  # names in each module and class
  for path, tree in trees.items():
    defined.setdefault(path.stem, set()).update(_names(tree))
    folder = path.parent
    defined.setdefault(folder.name, set()).add(path.stem)
    defined.setdefault(folder.parent.name, set()).add(folder.name)
    if path.name == '__init__.py':
      defined[folder.name] |= _names(tree)
    for node in ast.walk(tree):
      if isinstance(node, ast.ClassDef):
        defined.setdefault(node.name, set()).update(_names(node))
        bases[node.name] = [ast.unparse(b).split('.')[-1] for b in node.bases]
  for _ in range(3):  # names of base classes of base classes
    for name, parents in bases.items():
      for parent in parents:
        defined[name] |= defined.get(parent, set())
  wrong, count = [], 0
  documented = ast.Module | ast.ClassDef | ast.FunctionDef
  for path, tree in trees.items():
    nodes = list(ast.walk(tree))
    own = OTHERS | {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= _names(tree) - defined.keys()
    for node in nodes:
      text = ast.get_docstring(node) if isinstance(node, documented) else None
      for name in DOTTED.findall(text or ''):
        first, *others = name.split('.')
        if first in SECTIONS or FILE.fullmatch(name) or others[-1] == 'NAME':
          continue
        if first not in defined:
          is_known = first in own or importlib.util.find_spec(first)
          wrong += [] if is_known else [f'{path.name}: `{name}`']
          continue
        count += 1
        for owner, each in zip([first, *others], others, strict=False):
          if each not in defined.get(owner, {each}):
            wrong.append(f'{path.name}: `{name}`')
  assert count > 200
  assert not wrong, '\n'.join(wrong)
