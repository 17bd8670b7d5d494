#!/usr/bin/env bash
# Makes an environment and runs the tests in it (CPU only).
#
# Usage: bash launch/test.sh [--long | --all] [pytest arguments]
#   bash launch/test.sh          all but the slow ones: 3,900 in ten minutes
#   bash launch/test.sh --long   the slow ones too, among them those that start,
#     kill and resume commands: 40 minutes, as in CI
#   bash launch/test.sh --all    and each fault injected as often as stated
#   bash launch/test.sh --mutants [--jobs=N] [NAME...]
#     breaks the code in many places instead, one after another, and lists those
#     that no test notices (tests/mutants); takes longer than the suite
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
make_environment requirements-test.txt
if [[ "${1-}" == --mutants ]]; then
  exec python tests/mutants/run.py "${@:2}"
fi
ruff format --check .
ruff check .
pyright
chosen=(-m 'not slow and not long')
if [[ "${1-}" == --all || "${1-}" == --long ]]; then
  [[ "$1" == --long ]] || export VIT_JAX_FAULTS=all
  chosen=()
  shift
fi
# Two processes: most tests wait half of their time for another's single thread.
python -m pytest -n 2 --dist=loadfile --no-loadscope-reorder \
  ${chosen[@]+"${chosen[@]}"} "$@"
