# shellcheck shell=bash
# Functions for the Python environment of the other scripts, which source it.

# Creates (once) and activates a virtual environment with the tested versions.
# Arguments: requirements files in addition to requirements.txt.
make_environment() {
  # Otherwise, each process would compile the modules that it imports: half of
  # the time in which tests are collected and commands start.
  unset PYTHONDONTWRITEBYTECODE
  local venv="${VIT_JAX_VENV:-.venv}"
  local python
  if ! python="$(find_python)"; then
    echo "error: Python 3.11 or newer is needed (python3 is" \
      "$(python3 --version 2>&1)). Install it, or set PYTHON." >&2
    exit 2
  fi
  local files=(-r requirements.txt) file
  for file in "$@"; do files+=(-r "$file"); done
  local wanted constraints
  constraints="$(constraints_for "$python")"
  wanted="$(cat requirements.txt "$@" "$constraints" | cksum)"
  if [[ ! -f "$venv/installed" || "$(cat "$venv/installed")" != "$wanted" ]]
  then
    echo "installing into $venv (once)"
    "$python" -m venv "$venv"
    # The output of pip is shown only if it fails.
    if ! "$venv/bin/python" -m pip install --quiet --no-compile \
      --disable-pip-version-check -c "$constraints" "${files[@]}" --editable . \
      >"$venv/pip.log" 2>&1
    then
      cat "$venv/pip.log" >&2
      echo "error: the packages could not be installed into $venv; see the" \
        "output of pip above. If the package index cannot be reached, set" \
        "HTTPS_PROXY or PIP_INDEX_URL; then run the same command again." >&2
      exit 2
    fi
    # Compiles only the modules that the commands need, a third of 12,000.
    "$venv/bin/python" -c 'import tensorflow_datasets, vit_jax.finetune' \
      >/dev/null 2>&1 || true # the next command reports errors
    echo "$wanted" >"$venv/installed"
  fi
  # shellcheck disable=SC1091
  source "$venv/bin/activate"
}

# Prints the file with the tested versions for an interpreter. The newest JAX
# that supports Python 3.11 is 0.10.
constraints_for() {
  if "$1" -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    echo constraints-3.13.txt
  else
    echo constraints.txt
  fi
}

# Prints a Python of version 3.11 or newer.
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [[ -n "$candidate" ]] && "$candidate" -c \
      'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  return 1
}

# Succeeds if a workdir contains a committed checkpoint.
has_checkpoint() {
  local directory
  for directory in "$1"/checkpoints/*/; do
    [[ "$(basename "$directory")" =~ ^[0-9]+$ ]] && return
  done
  return 1
}
