# shellcheck shell=bash
# Sourced by the other scripts: the Python environment that they run in.

# Makes (once) and activates a virtual environment with the tested versions.
# Arguments: requirements files besides requirements.txt.
make_environment() {
  local venv="${VIT_JAX_VENV:-.venv}"
  local python
  if ! python="$(find_python)"; then
    echo "error: Python 3.11 or newer is needed (python3 is" \
      "$(python3 --version 2>&1)). Install it, or set PYTHON." >&2
    exit 2
  fi
  local files=(-r requirements.txt) file
  for file in "$@"; do files+=(-r "$file"); done
  local wanted
  wanted="$(cat requirements.txt "$@" constraints.txt | cksum)"
  if [[ ! -f "$venv/installed" || "$(cat "$venv/installed")" != "$wanted" ]]
  then
    echo "installing into $venv (once)"
    "$python" -m venv "$venv"
    # pip's warnings (of mirrors that do not answer, say) are shown if it fails.
    if ! "$venv/bin/python" -m pip install --quiet --no-compile \
      --disable-pip-version-check -c constraints.txt "${files[@]}" --editable . \
      >"$venv/pip.log" 2>&1
    then
      cat "$venv/pip.log" >&2
      echo "error: the packages could not be installed into $venv; pip says" \
        "above why. Without a way to a package index, set HTTPS_PROXY or" \
        "PIP_INDEX_URL; then run the same line again." >&2
      exit 2
    fi
    # Of 12,000 modules the commands need a third: these are compiled now.
    env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -c \
      'import clu.metric_writers, tensorflow_datasets, vit_jax.finetune' \
      >/dev/null 2>&1 || true # what is wrong shows in what is run next
    echo "$wanted" >"$venv/installed"
  fi
  # shellcheck disable=SC1091
  source "$venv/bin/activate"
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

# Whether a workdir holds a committed checkpoint.
has_checkpoint() {
  local directory
  for directory in "$1"/checkpoints/*/; do
    [[ "$(basename "$directory")" =~ ^[0-9]+$ ]] && return
  done
  return 1
}
