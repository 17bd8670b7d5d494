#!/usr/bin/env bash
# Runs the fast tests that compare with no other project on Python 3.13, with
# the newest tested packages (constraints-3.13.txt).
#
# Usage: bash launch/test_newest.sh [--install | --ci] [pytest arguments]
#   --install             only creates the environment
#   --ci                  only the first case of each test, of the packages that
#     depend most on the versions of JAX, Flax, Optax, Orbax and Python, as in CI
#   PYTHON                interpreter (default: python3.13, also one of pyenv)
#   VIT_JAX_VENV_NEWEST   directory of the environment (default .venv-newest)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck disable=SC1091
source launch/environment.sh

for candidate in "${PYTHON:-}" python3.13 \
  "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.13.*/bin/python; do
  if [[ -n "$candidate" ]] && "$candidate" -c \
    'import sys; sys.exit(sys.version_info[:2] != (3, 13))' 2>/dev/null; then
    found="$candidate"
  fi
done
if [[ -z "${found-}" ]]; then
  echo "no Python 3.13 on this machine: its tests are not run"
  exit 0
fi
VIT_JAX_VENV="${VIT_JAX_VENV_NEWEST:-.venv-newest}" PYTHON="$found" \
  make_environment requirements-test.txt requirements-tensorflow.txt
if [[ "${1-}" == --install ]]; then exit; fi
export JAX_PLATFORMS=cpu
# Tests that import another project, or read the programs of one compiler, run
# only with the versions in constraints.txt. TensorFlow 2.21, for example, cannot
# run the programs of JAX 0.12, so SavedModels need an older JAX.
folders=(tests)
if [[ "${1-}" == --ci ]]; then
  export VIT_JAX_TESTS=first
  folders=(tests/{arrays,checkpoint,config,models,optim,processes,run,training}
    tests/data/test_{contract,index,order,splits,stream,workers}.py)
  shift
fi
readarray -t files < <(grep -rLE --include='test_*.py' \
  'torch|timm|transformers|references|libtpu|tensorflow' \
  "${folders[@]}" | grep -vE '^tests/(docs|mutants)/' | sort)
python -m pytest -n 2 --dist=worksteal -m 'not slow and not long' \
  "${files[@]}" "$@"
