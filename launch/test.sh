#!/usr/bin/env bash
# Creates an environment and runs the tests in it (CPU only).
#
# Usage: bash launch/test.sh [--ci | --all] [pytest arguments]
#   bash launch/test.sh          all tests except the slow ones, in six minutes
#   bash launch/test.sh --ci     also the slow tests, for example those that
#     start, kill and resume commands, as in CI
#   bash launch/test.sh --all    also the tests marked `long`; injects each fault
#     as often as stated, and tests all cases of long lists
#   bash launch/test.sh --mutants [--jobs=N] [NAME...]
#     instead changes the code in many ways, one after another, and lists the
#     changes that no test notices (tests/mutants); takes longer than the tests
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
make_environment requirements-test.txt requirements-peers.txt \
  requirements-tensorflow.txt
if [[ "${1-}" == --mutants ]]; then
  exec python tests/mutants/run.py "${@:2}"
fi
if [[ "${1-}" == --all && ! -d "$VIRTUAL_ENV/gpu" ]]; then
  python -m pip install --quiet --no-deps --target "$VIRTUAL_ENV/gpu" \
    --requirement requirements-gpu.txt || echo 'no compiler for GPUs'
fi
ruff format --check .
ruff check .
# Types are checked next to the tests, which leave a core idle now and then.
report="$(mktemp)"
pyright >"$report" 2>&1 &
types=$!
trap 'kill "$types" 2>/dev/null || true; rm -f "$report"' EXIT
chosen=(-m 'not slow and not long')
if [[ "${1-}" == --ci ]]; then
  chosen=(-m 'not long')
  shift
elif [[ "${1-}" == --all ]]; then
  export VIT_JAX_TESTS=all
  chosen=()
  shift
fi
# Two processes, because most tests use a single thread half of the time.
code=0
python -m pytest -n 2 --dist=worksteal ${chosen[@]+"${chosen[@]}"} "$@" ||
  code=$?
wait "$types" || code=$?
cat "$report"
exit "$code"
