"""Opens HTML reports in headless Chromium; checks console and requests."""

import html
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from test_report import EVIL, random_predictions, trained, workdir

from vit_jax.analysis.report import page, record

CHROMIUM = next(
  filter(None, map(shutil.which, ('chromium', 'chromium-browser'))), None
)
pytestmark = pytest.mark.skipif(
  CHROMIUM is None, reason='Chromium not installed'
)
WIDTHS = (400, 1400)
# Reports the width, the needed width and the requests of each frame.
PROBE = """<pre id="probe"></pre><script>
onload = () => {
  const frames = [...document.querySelectorAll('iframe')];
  document.getElementById('probe').textContent = JSON.stringify(frames.map(f =>
    ({
      name: f.name,
      has: f.contentWindow.innerWidth,
      needs: f.contentDocument.documentElement.scrollWidth,
      requests: f.contentWindow.performance.getEntriesByType('resource')
        .map(e => e.name).filter(name => !name.startsWith('data:')),
      broken: [...f.contentDocument.images]
        .filter(i => i.complete && !i.naturalWidth).length,
    })));
}
</script>"""


def run_page(file, *flags):
  """Opens a page in Chromium.

  Returns:
    The JSON object in its element `probe`, and the messages of the console.
  """
  command = [
    CHROMIUM,
    '--headless',
    '--no-sandbox',
    '--disable-gpu',
    '--dump-dom',
    '--disable-background-networking',
    '--disable-dev-shm-usage',
    '--enable-logging=stderr',
    f'--user-data-dir={file.parent / "profile"}',
    *flags,
    file.as_uri(),
  ]
  done = subprocess.run(command, capture_output=True, text=True, timeout=200)
  result = re.search('<pre id="probe">(.*?)</pre>', done.stdout, re.S)
  assert result, done.stderr[-2000:]
  console = [x for x in done.stderr.splitlines() if 'CONSOLE' in x]
  return json.loads(html.unescape(result[1])), console


def probed(folder, pages):
  """Returns the probe's results for pages at each width, and console lines."""
  frames = [
    f'<iframe name="{name} {width}" width="{width}" height="800" '
    f'style="border:0" srcdoc="{html.escape(text)}"></iframe>'
    for name, text in pages.items()
    for width in WIDTHS
  ]
  file = folder / 'frames.html'
  file.write_text(f'<!DOCTYPE html><body>{"".join(frames)}{PROBE}</body>')
  return run_page(file)


def unusual_pages(folder):
  """Returns reports with NaN, with 1,000 classes, and with HTML in names."""
  metrics = [{'step': s, 'loss': None if s == 3 else 1.0} for s in range(1, 6)]
  events = [
    {'event': 'start', 'step': 0},
    {'event': 'rollback', 'step': 2, 'from': 3, 'skip': [2], 'why': EVIL},
    {'event': 'start', 'step': 2},
  ]
  bad = workdir(folder / 'bad', metrics, events)
  many = trained(folder / 'many', np.linspace(7, 3, 300).tolist())
  names = [f'class of birds and other animals number {i}' for i in range(1000)]
  value = random_predictions(2000, 1000, names, side=96)
  record.write(many, {'step': 1, 'training': [], 'judged': value})
  evil = trained(
    folder / '<b onclick=x>run',
    [3.0, 2.0],
    command=[f'--config.source.path={EVIL}', '--config=' + 'long' * 60],
  )
  value = random_predictions(50, 20, [f'{EVIL}{i}' for i in range(20)])
  training = [record.picture(np.zeros((8, 8, 3), np.uint8), [EVIL])]
  record.write(evil, {'step': 20, 'training': training, 'judged': value})
  found = {at.name[:4]: record.read(at) for at in (bad, many, evil)}
  pages = {name: page.render(run) for name, run in found.items()}
  several = page.render_comparison(list(found.values()))
  return {html.escape(k): v for k, v in pages.items()} | {'several': several}


@pytest.mark.slow
def test_unusual_reports_render_at_two_widths(tmp_path):
  """No console output, request, broken image or horizontal overflow."""
  found, console = probed(tmp_path, unusual_pages(tmp_path))
  assert len(found) == 8
  assert console == []
  for frame in found:
    assert frame['requests'] == [] and frame['broken'] == 0, frame
    assert frame['needs'] <= frame['has'] in WIDTHS, frame
