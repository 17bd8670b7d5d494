#!/usr/bin/env bash
# Runs on every host of a TPU slice, for vit_jax.launch --target=tpu.
#
# The state of a host is in one directory, the grandparent of this script:
#   code/   the installed commit             lock       held while a job runs
#   venv/   Python 3.11 and packages         log        output of all jobs
#   pid     process number of the trainer    exit_code  of the last job
# The lock, not the process number, determines whether a job is running: the
# kernel releases it however the job ends, and two starts cannot both take it.
set -euo pipefail
job=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# Takes the lock on descriptor 9 for this process and its children.
take_lock() {
  exec 9>"$job/lock"
  flock --nonblock 9
}

# Installs the code that was unpacked to code.new, and its packages.
#
# The images contain Python 3.10, but JAX needs 3.11. uv installs a standalone
# build without root and without apt, which automatic updates lock for minutes
# on a new machine. uv itself is installed by the pip of the image into its own
# directory, which works even if the system's Python refuses installations.
install() {
  if ! take_lock; then
    echo "$(hostname): a job is running; its code is not changed." >&2
    exit 1
  fi
  rm -rf "$job/code"
  mv "$job/code.new" "$job/code"
  cd "$job/code"
  python3 -m pip install --quiet --upgrade --target "$job/uv" uv
  local uv=$job/uv/bin/uv
  if [[ ! -x $job/venv/bin/python ]]; then
    "$uv" venv --quiet --python 3.11 "$job/venv"
  fi
  "$uv" pip install --quiet --python "$job/venv/bin/python" \
    --constraints constraints.txt --editable '.[tpu]'
  # A failing import should be reported now, not in the log of the job.
  "$job/venv/bin/python" -c 'import vit_jax.train'
  echo "$(hostname): installed"
}

# Starts the trainer with these arguments, detached from this connection.
start() {
  if ! take_lock; then
    echo "$(hostname): already running; not started a second time"
    return
  fi
  rm -f "$job/exit_code" "$job/pid"
  # A new session outlives the connection; it inherits the lock.
  setsid bash "${BASH_SOURCE[0]}" run "$@" </dev/null >>"$job/log" 2>&1 &
  echo "$(hostname): started"
}

# Runs the trainer in the detached process and records its exit code.
run() {
  local code=0
  cd "$job/code"
  echo "=== $(date -u +%FT%TZ) python -m vit_jax.train $*"
  # Without descriptor 9: a surviving child of the trainer would hold the lock.
  "$job/venv/bin/python" -m vit_jax.train "$@" 9>&- &
  echo $! >"$job/pid"
  wait $! || code=$?
  echo "$code" >"$job/exit_code"
  echo "=== $(date -u +%FT%TZ) exit code $code"
}

# Follows the log until the job ends, and returns the job's exit code; 1 if
# there is none, for example because the machine restarted.
follow() {
  touch "$job/log"
  flock --shared "$job/lock" true & # ends with the job
  tail --lines=200 --follow=name --pid=$! "$job/log"
  return "$(cat "$job/exit_code" || echo 1)"
}

# Sends SIGTERM to the trainer, which saves its state, and waits for its end.
stop() {
  if ! flock --shared --nonblock "$job/lock" true && [[ -s $job/pid ]]; then
    kill -TERM "$(<"$job/pid")" || true # it may have ended just now
    flock --shared "$job/lock" true
  fi
}

"$@"
