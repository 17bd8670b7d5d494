"""Formats the tables of a study: its results and the published numbers."""

import csv
import io
import math
from collections.abc import Mapping

from vit_jax.study.chains import Chain
from vit_jax.study.contents import UPSTREAM, Number, Study
from vit_jax.sweeps.results import Spread

Chains = Mapping[str, Chain]


def markdown(study: Study, chains: Chains) -> str:
  """Formats the study's table: measured values next to the paper's."""
  columns = _columns(study, chains)
  head = ['row', *columns]
  lines = [f'# {study.title}', '']
  lines += [study.note, ''] if study.note else []
  legend = '%; mean ± sample standard deviation over runs.'
  if study.published or any(row.paper for row in study.rows.values()):
    legend += ' Published numbers are in parentheses.'
  lines += [legend, '', f'| {" | ".join(head)} |', '|---' * len(head) + '|']
  for name, row in study.rows.items():
    cells = [
      _cell(chains[name].spread(column), row.paper.get(column))
      if column in row.columns
      else ''
      for column in columns
    ]
    lines.append(f'| {" | ".join([name, *cells])} |')
  for name, model in study.published.items():
    cells = [
      f'({model.paper[column]})' if column in model.paper else ''
      for column in columns
    ]
    lines.append(f'| {" | ".join([name, *cells])} |')
  parts = [part for chain in chains.values() for part in chain.progress]
  ready = sum(len(part.ready) for part in parts)
  if ready or not all(part.complete for part in parts):
    lines += ['', f'Not finished: {ready} runs can be started now.']
  return '\n'.join([*lines, ''])


def _columns(study: Study, chains: Chains) -> list[str]:
  """Returns the columns, without that of pre-training if it has no values."""
  has_values = any(chain.pretrain.runs for chain in chains.values()) or any(
    UPSTREAM in row.paper for row in study.rows.values()
  )
  return study.columns if has_values else study.columns[1:]


def _cell(spread: Spread | None, published: Number | None) -> str:
  """Formats a value and the published number: '84.01 ± 0.12 (84.15)'."""
  measured = '–' if spread is None else str(spread)
  return measured if published is None else f'{measured} ({published})'


def rows(study: Study, chains: Chains) -> str:
  """Returns CSV with one line per finished run, with values in [0, 1].

  Lines of derived columns and of published numbers follow, also as fractions,
  without a workdir.
  """
  out = io.StringIO()
  head = ['row', 'column', 'transfer', 'stage', 'setting', 'seed', 'metric']
  writer = csv.writer(out, lineterminator='\n')
  writer.writerow([*head, 'value', 'workdir'])
  for name in study.rows:
    parts = {UPSTREAM: chains[name].pretrain} | chains[name].transfers
    for key, progress in parts.items():
      column = key.partition('/')[0]
      for run, value in progress.scores:
        setting = ' '.join(f'{k}={v}' for k, v in run.setting.items())
        cells = [run.stage, setting, run.seed, run.metric]
        writer.writerow([name, column, key, *cells, value, run.workdir])
    for column in chains[name].derived:
      if spread := chains[name].spread(column):
        value = spread.mean
        writer.writerow([name, column, '', 'derived', '', '', '', value, ''])
  papers = {
    name: model.paper
    for name, model in {**study.rows, **study.published}.items()
  }
  for name, paper in papers.items():
    for column, published in paper.items():
      value = round(published.mean / 100, 7)
      writer.writerow([name, column, '', 'paper', '', '', '', value, ''])
  return out.getvalue()


def points(column: str, chain: Chain) -> tuple[float, float] | None:
  """Returns mean and standard deviation of a column in %; None if unknown.

  The standard deviation of a single run is 0.
  """
  spread = chain.spread(column)
  if spread is None or not math.isfinite(spread.mean):
    return None
  std = 0.0 if math.isnan(spread.std) else spread.std
  return 100 * spread.mean, 100 * std
