"""The part of JSON Schema that the manifests need; objects are closed."""

import re

_TYPES = {'object': dict, 'array': list, 'string': str, 'integer': int}


def errors(value, schema, path=''):
  """Returns the errors of a value, one line each."""
  if type(value) is not _TYPES[schema['type']]:
    return [f'{path}: {value!r} is no {schema["type"]}']
  found = []
  if value not in schema.get('enum', [value]):
    found.append(f'{path}: {value!r} is none of {schema["enum"]}')
  if 'pattern' in schema and not re.search(schema['pattern'], value):
    found.append(f'{path}: {value!r} is not {schema["pattern"]}')
  if 'minimum' in schema:
    if not schema['minimum'] <= value <= schema.get('maximum', value):
      found.append(f'{path}: {value} is out of range')
  if isinstance(value, list):
    for index, item in enumerate(value):
      found += errors(item, schema['items'], f'{path}[{index}]')
  if isinstance(value, dict):
    for key in schema.get('required', ()):
      if key not in value:
        found.append(f'{path}: {key} is missing')
    for key, item in value.items():
      inner = schema.get('values') or schema['properties'].get(key)
      if inner is None:
        found.append(f'{path}.{key}: no such field')
      else:
        found += errors(item, inner, f'{path}.{key}')
  return found
