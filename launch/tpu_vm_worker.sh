#!/usr/bin/env bash
# The part of launch/tpu_vm.sh that runs on every worker of a slice.
#
# The state of a worker is in one directory, the grandparent of this script:
#   code/   the installed commit             lock       held while a job runs
#   venv/   Python 3.11 and packages         log        output of all jobs
#   pid     process number of the trainer    exit_code  of the last job
# The lock, not the process number, determines whether a job is running: the
# kernel releases it however the job ends, and two starts cannot both take it.

set -euo pipefail

job=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# Succeeds if a job or an installation holds the lock.
is_running() {
  ! flock --shared --nonblock "$job/lock" true
}

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

# Prints the state of the last job.
outcome() {
  if is_running; then
    echo 'running'
  elif [[ -s $job/exit_code ]]; then
    local code
    code=$(<"$job/exit_code")
    case $code in
      0) echo 'finished' ;;
      42) echo 'preempted, state saved (exit code 42); train resumes' ;;
      *) echo "failed with exit code $code; train resumes" ;;
    esac
  elif [[ -e $job/log ]]; then
    echo 'gone without an exit code (machine restarted?); train resumes'
  else
    echo 'not started'
  fi
}

# Follows the log until the job ends, and returns the job's exit code.
follow() {
  touch "$job/log"
  flock --shared "$job/lock" true & # ends with the job
  tail --lines=200 --follow=name --pid=$! "$job/log"
  echo "$(hostname): $(outcome)" >&2
  if [[ -s $job/exit_code ]]; then
    return "$(<"$job/exit_code")"
  fi
  return 1
}

# Prints the state of the job and the last lines of its log.
status() {
  echo "$(hostname): $(outcome)"
  if [[ -e $job/log ]]; then
    tail --lines=3 "$job/log" | sed 's/^/  /'
  fi
}

# Sends SIGTERM to the trainer, which saves its state, and waits for its end.
stop() {
  if is_running && [[ -s $job/pid ]]; then
    kill -TERM "$(<"$job/pid")" || true # it may have ended just now
    flock --shared "$job/lock" true
  fi
  echo "$(hostname): $(outcome)"
}

case ${1:-} in
  install | start | run | follow | status | stop) "$@" ;;
  *)
    echo "error: got '${1:-}'; allowed: install, start, follow, status, stop." \
      'launch/tpu_vm.sh calls this script; run launch/tpu_vm.sh instead.' >&2
    exit 2
    ;;
esac
