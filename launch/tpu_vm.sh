#!/usr/bin/env bash
# Trains on a Cloud TPU VM slice; `launch/tpu_vm.sh --help` says how.
#
# Runs on your own machine (bash 3.2 or newer, git, gcloud) and drives the slice
# through gcloud. What happens on a worker is in launch/tpu_vm_worker.sh, which
# travels with the code.

set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE --project=PROJECT
         [OPTION...] [-- TRAINER_ARGUMENT...]
Commands:
  up       create, install, train and log in one; what is done is not done again
  create   make the slice, or make it anew if it was preempted
  install  copy the committed code (git HEAD) to every worker and install it
           with the versions of constraints.txt
  train    start the job on every worker; one that runs is left alone, one that
           has ended resumes from its workdir
  start    install and train in one, on a slice that is there already
  log      follow the main worker's log; ends with the job, and returns its exit
           code (Ctrl-C ends the following, not the job)
  status   state of the slice, and of the job on every worker
  stop     end the job; it resumes from its newest checkpoint
  delete   delete the slice; the workdir stays
Options (a command overlooks those that it has no use for):
  --name=NAME       of the slice
  --zone=ZONE       for example europe-west4-a
  --project=ID      the Google Cloud project
  --type=TYPE       accelerator, for example v3-32 (up, create)
  --version=IMAGE   runtime image; default: Google's for the type (up, create)
  --spot            cheaper, may be preempted (up, create)
  --workdir=DIR     of the run, on gs:// (up, train, start)
  --config=FILE     default configs/l16_i21k.py (up, train, start)
  --data_dir=DIR    TFDS directory, on gs:// or on the workers' disks; default
                    ~/tensorflow_datasets there (up, train, start)
  --dry_run         print the commands, as for a slice that is not there yet
Example: the main job; the same line again resumes it:
  launch/tpu_vm.sh up --name=vit --zone=europe-west4-a --project=my-project \
    --type=v3-32 --workdir=gs://my-bucket/l16 --data_dir=gs://my-bucket/tfds
A slice of several workers needs your key in the agent:
  ssh-add ~/.ssh/google_compute_engine
TEXT
}

readonly commands='up create install train start log status stop delete'
readonly valued="--name --zone --project --type --version --workdir --config\
 --data_dir"
readonly worker='vit_jax_job/code/launch/tpu_vm_worker.sh'

command='' name='' zone='' project='' type='' version='' workdir='' data_dir=''
config='configs/l16_i21k.py'
dry_run=false
create_flags=()
trainer_arguments=()

fail() { # MESSAGE [CODE]
  echo "error: $1" >&2
  exit "${2:-1}"
}

usage_error() { # says what came, what is allowed, what to do
  fail "$1" 2
}

# Sets the variables above; each valued option has the one of its name.
parse() {
  command=$1
  if [[ " $commands " != *" $command "* ]]; then
    usage_error "the command is '$command'; allowed: ${commands// /, }. See\
 launch/tpu_vm.sh --help."
  fi
  while shift && (($# > 0)); do
    local option=${1%%=*} value=${1#*=}
    case $1 in
      --)
        trainer_arguments=("${@:2}")
        return
        ;;
      --dry_run) dry_run=true && continue ;;
      --spot) create_flags=(--spot) && continue ;;
    esac
    if [[ " $valued " != *" $option "* ]]; then
      usage_error "got '$1'; allowed: $valued --spot --dry_run.\
 Arguments for the trainer go after --."
    fi
    if [[ $1 != *=* ]]; then
      value=${2:-}
      shift
    fi
    if [[ -z $value || $value == --* ]]; then
      usage_error "$option came without a value; write $option=VALUE."
    fi
    printf -v "${option#--}" '%s' "$value"
  done
}

# need NAME EXAMPLE: fails unless the option has a value.
need() {
  if [[ -z ${!1} ]]; then
    usage_error "$command needs --$1 and it did not come; add --$1=$2."
  fi
}

check() {
  need name vit
  need zone europe-west4-a
  need project PROJECT_ID
  if [[ ! $name =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]]; then
    usage_error "--name is '$name'; allowed: a lower-case letter, then\
 lower-case letters, digits and hyphens. Take a name such as vit-l16."
  fi
  case $command in
    create) check_type ;;
    train | start) check_job ;;
    up)
      check_type
      check_job
      ;;
  esac
  $dry_run || type -P gcloud >/dev/null || usage_error "gcloud is not\
 installed; install the Google Cloud SDK, or see the commands with --dry_run."
}

# Images as in Google's table of TPU software versions for JAX.
check_type() {
  need type v3-32
  if [[ -z $version ]]; then
    case $type in
      v[234]-*) version=tpu-ubuntu2204-base ;;
      v5litepod-*) version=v2-alpha-tpuv5-lite ;;
      v5p-*) version=v2-alpha-tpuv5 ;;
      v6e-*) version=v2-alpha-tpuv6e ;;
      *) usage_error "--version did not come and --type is '$type'; an image is\
 known for v2-, v3-, v4-, v5litepod-, v5p- and v6e-. Correct --type, or add\
 --version=IMAGE." ;;
    esac
  fi
}

check_job() {
  need workdir gs://BUCKET/DIRECTORY
  if [[ $workdir != gs://?* ]]; then
    usage_error "--workdir is '$workdir'; it must be on gs://, which every\
 worker sees and which outlives the slice. Give --workdir=gs://BUCKET/DIRECTORY."
  fi
  if [[ ! -f ${config%%:*} ]]; then
    usage_error "--config is '$config', which is no file of this checkout; give\
 one of $(echo configs/*.py)."
  fi
}

# Words as one line for any POSIX shell: like printf %q, but without bash's own
# $'...', and easier to read in --dry_run.
quote() {
  local word separator='' escaped="'\\''"
  for word in "$@"; do
    printf '%s' "$separator"
    separator=' '
    if [[ $word =~ ^[a-zA-Z0-9_./:=,@%+-]+$ ]]; then
      printf '%s' "$word"
      continue
    fi
    printf "'"
    while [[ $word == *\'* ]]; do
      printf '%s%s' "${word%%\'*}" "$escaped"
      word=${word#*\'}
    done
    printf "%s'" "$word"
  done
}

# Runs a command, or prints it.
run() {
  if $dry_run; then
    quote "$@"
    echo
  else
    "$@"
  fi
}

# Runs a command for its output, left in $answer; printed, it answers nothing.
ask() {
  answer=''
  if $dry_run; then
    run "$@"
  else
    answer=$("$@")
  fi
}

tpu_vm() { # MODE SUBCOMMAND ARGUMENT...
  "$1" gcloud compute tpus tpu-vm "${@:2}" \
    "--zone=$zone" "--project=$project"
}

on_workers() { # MODE WORKERS COMMAND_LINE, as the remote shell reads it
  tpu_vm "$1" ssh "$name" "--worker=$2" "--command=$3"
}

create() {
  tpu_vm ask describe "$name" '--format=value(state)' 2>/dev/null || answer=''
  case $answer in
    READY) return ;;
    PREEMPTED | TERMINATED) remove ;; # such a slice cannot be started again
    '') ;;
    *) fail "slice $name is $answer; only a READY one can be used. Try again\
 in a minute, or delete it." ;;
  esac
  tpu_vm run create "$name" "--accelerator-type=$type" "--version=$version" \
    ${create_flags[@]+"${create_flags[@]}"}
}

# Succeeds if the job runs on all workers, fails if on none; else ends.
job_runs() {
  on_workers ask all "mkdir -p vit_jax_job && if flock --shared --nonblock\
 vit_jax_job/lock true; then echo idle; else echo running; fi" || exit
  case $answer in
    *running*idle* | *idle*running*)
      fail "the job runs on some of the workers only. Those end by themselves\
 when they miss the others; wait for it (see status), or use stop."
      ;;
  esac
  [[ $answer == *running* ]]
}

install() {
  local archive=build/$name.tar.gz packed=vit_jax_code.tar.gz
  if ! $dry_run && [[ -n $(git status --porcelain --untracked-files=no) ]]; then
    echo 'note: changes that are not committed do not travel' >&2
  fi
  run mkdir -p build
  run git archive --format=tar.gz "--output=$archive" HEAD
  tpu_vm run scp "$archive" "$name:$packed" --worker=all
  local new=vit_jax_job/code.new
  on_workers run all "rm -rf $new && mkdir -p $new && tar -xzf $packed -C $new\
 && bash $new/launch/tpu_vm_worker.sh install"
}

# Starts the job unless it runs; `up` and `start` bring the code first.
train() {
  if job_runs; then
    echo 'already running; not started a second time' >&2
    return
  fi
  if [[ $command == up || $command == start ]]; then
    install
  fi
  local line=''
  [[ -z $data_dir ]] || line="TFDS_DATA_DIR=$(quote "$data_dir") "
  line+="bash $worker start $(quote "--config=$config" \
    "--workdir=$workdir" ${trainer_arguments[@]+"${trainer_arguments[@]}"})"
  on_workers run all "$line"
}

follow() { # worker 0 is JAX's process 0, the one that reports progress
  on_workers run 0 "bash $worker follow"
}

status() {
  tpu_vm ask describe "$name" '--format=value(state)'
  if ! $dry_run; then
    echo "slice $name: $answer"
    [[ $answer == READY ]] || return 0
  fi
  on_workers run all "bash $worker status"
}

remove() {
  tpu_vm run delete "$name" --quiet
}

main() {
  [[ ${1:-} != --help ]] || { usage && return; }
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  parse "${@:-}"
  check
  case $command in
    create) create ;;
    install)
      ! job_runs || fail 'the job runs and keeps its code; stop it first.'
      install
      ;;
    train | start) train ;;
    up) # not joined by &&, which would switch off `set -e` inside them
      create
      train
      follow
      ;;
    log) follow ;;
    status) status ;;
    stop) on_workers run all "bash $worker stop" ;;
    delete) remove ;;
  esac
}

main "$@"
