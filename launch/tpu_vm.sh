#!/usr/bin/env bash
# Trains on one Cloud TPU VM slice. See `launch/tpu_vm.sh --help`.
# `python -m vit_jax.launch --target=tpu-vm` calls this script, and restarts the
# run until it is finished.
#
# The script runs on your own machine (bash 3.2 or newer, git, gcloud) and
# controls the slice through gcloud. launch/tpu_vm_worker.sh, which is copied
# with the code, is the part that runs on each worker.

set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: launch/tpu_vm.sh COMMAND --name=NAME --zone=ZONE --project=PROJECT
         [OPTION...] [-- TRAINER_ARGUMENT...]
Commands:
  up       create, install, train and log; skips the steps that are done already
  create   create the slice; a preempted slice is deleted and created again
  install  copy the committed code to every worker and install it with the
           versions in constraints.txt
  train    start the job on every worker; a running job is left alone, and a job
           that has ended resumes from its workdir
  start    install and train on an existing slice
  log      follow the log of worker 0 until the job ends, and return the exit
           code of the job (Ctrl-C stops the log, not the job)
  status   print the state of the slice and of the job on every worker
  stop     end the job after it has saved its state; train resumes it
  delete   delete the slice; the workdir is kept
Options (each command ignores the options that it does not need):
  --name=NAME       name of the slice
  --zone=ZONE       zone of the slice, for example europe-west4-a
  --project=ID      Google Cloud project
  --type=TYPE       accelerator type, for example v3-32 (up, create)
  --version=IMAGE   runtime image; default: Google's image for the type
                    (up, create)
  --spot            use a spot slice, which is cheaper and may be preempted
                    (up, create)
  --create_flag=FLAG
                    further flag of `gcloud compute tpus tpu-vm create`, for
                    example --create_flag=--network=my-network; may be repeated
                    (up, create)
  --commit=COMMIT   commit to install; default HEAD (up, install, start)
  --workdir=DIR     workdir of the run, on gs:// (up, train, start)
  --config=FILE     config; default configs/l16_i21k.py (up, train, start)
  --data_dir=DIR    TFDS directory, on gs:// or on the disks of the workers;
                    default: ~/tensorflow_datasets of the workers
                    (up, train, start)
  --dry_run         print the commands as if the slice did not exist
Example: the main job; the same command resumes it:
  launch/tpu_vm.sh up --name=vit --zone=europe-west4-a --project=my-project \
    --type=v3-32 --workdir=gs://my-bucket/l16 --data_dir=gs://my-bucket/tfds
If the slice has several workers, gcloud needs your key in the SSH agent:
  ssh-add ~/.ssh/google_compute_engine
TEXT
}

readonly commands='up create install train start log status stop delete'
readonly valued="--name --zone --project --type --version --workdir --config\
 --data_dir --commit"
readonly worker='vit_jax_job/code/launch/tpu_vm_worker.sh'

command='' name='' zone='' project='' type='' version='' workdir='' data_dir=''
commit=''
config='configs/l16_i21k.py'
dry_run=false
create_flags=()
trainer_arguments=()

fail() { # MESSAGE [CODE]
  echo "error: $1" >&2
  exit "${2:-1}"
}

usage_error() { # MESSAGE: the given value, the allowed values, the remedy
  fail "$1" 2
}

# Sets the variables above from the command line. An option with a value sets
# the variable of the same name.
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
      --spot) create_flags+=(--spot) && continue ;;
      --create_flag=?*) create_flags+=("$value") && continue ;;
    esac
    if [[ " $valued " != *" $option "* ]]; then
      usage_error "got '$1'; allowed: $valued --spot --create_flag=FLAG\
 --dry_run. Arguments of the trainer follow after --."
    fi
    if [[ $1 != *=* ]]; then
      value=${2:-}
      shift
    fi
    if [[ -z $value || $value == --* ]]; then
      usage_error "$option has no value; write $option=VALUE."
    fi
    printf -v "${option#--}" '%s' "$value"
  done
}

# need NAME EXAMPLE: fails unless the option has a value.
need() {
  if [[ -z ${!1} ]]; then
    usage_error "$command needs --$1; add --$1=$2."
  fi
}

check() {
  need name vit
  need zone europe-west4-a
  need project PROJECT_ID
  if [[ ! $name =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]]; then
    usage_error "--name is '$name'; allowed: a lower-case letter, then\
 lower-case letters, digits and hyphens. Choose a name such as vit-l16."
  fi
  if [[ ! ${commit:-HEAD} =~ ^[a-zA-Z0-9][a-zA-Z0-9._/~^-]*$ ]]; then
    usage_error "--commit is '$commit'; allowed: a commit, branch or tag of\
 this checkout. Give one such as HEAD."
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
 installed; install the Google Cloud SDK, or print the commands with --dry_run."
}

# The default images are from Google's table of TPU software versions for JAX.
check_type() {
  need type v3-32
  if [[ -z $version ]]; then
    case $type in
      v[234]-*) version=tpu-ubuntu2204-base ;;
      v5litepod-*) version=v2-alpha-tpuv5-lite ;;
      v5p-*) version=v2-alpha-tpuv5 ;;
      v6e-*) version=v2-alpha-tpuv6e ;;
      *) usage_error "--type is '$type'; a default image is known for v2-, v3-,\
 v4-, v5litepod-, v5p- and v6e-. Correct --type, or add --version=IMAGE." ;;
    esac
  fi
}

check_job() {
  need workdir gs://BUCKET/DIRECTORY
  if [[ $workdir != gs://?* ]]; then
    usage_error "--workdir is '$workdir'; it must be on gs://, because all\
 workers use it and it outlives the slice. Give --workdir=gs://BUCKET/DIR."
  fi
  if [[ ! -f ${config%%:*} ]]; then
    usage_error "--config is '$config', which is not a file of this checkout;\
 give one of $(echo configs/*.py)."
  fi
}

# Prints words as one line that any POSIX shell splits into the same words.
# Unlike printf %q, it does not use bash's own $'...', and is easier to read.
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

# Runs a command; with --dry_run, prints it.
run() {
  if $dry_run; then
    quote "$@"
    echo
  else
    "$@"
  fi
}

# Runs a command and stores its output in $answer; with --dry_run, prints the
# command and stores nothing.
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

on_workers() { # MODE WORKERS COMMAND_LINE, quoted for the remote shell
  tpu_vm "$1" ssh "$name" "--worker=$2" "--command=$3"
}

create() {
  tpu_vm ask describe "$name" '--format=value(state)' 2>/dev/null || answer=''
  case $answer in
    READY) return ;;
    PREEMPTED | TERMINATED) remove ;; # a slice in this state cannot be started
    '') ;;
    *) fail "slice $name is $answer; it must be READY. Try again in a minute,\
 or delete it." ;;
  esac
  tpu_vm run create "$name" "--accelerator-type=$type" "--version=$version" \
    ${create_flags[@]+"${create_flags[@]}"}
}

# Succeeds if the job runs on all workers, and fails if it runs on none of them.
# Otherwise, ends the script with a message.
job_runs() {
  on_workers ask all "mkdir -p vit_jax_job && if flock --shared --nonblock\
 vit_jax_job/lock true; then echo idle; else echo running; fi" || exit
  case $answer in
    *running*idle* | *idle*running*)
      fail "the job runs only on some of the workers. These end by themselves\
 when the others do not answer; wait for that (see status), or use stop."
      ;;
  esac
  [[ $answer == *running* ]]
}

install() {
  local archive=build/$name.tar.gz packed=vit_jax_code.tar.gz
  if ! $dry_run && [[ -z $commit &&
    -n $(git status --porcelain --untracked-files=no) ]]; then
    echo 'note: uncommitted changes are not installed' >&2
  fi
  run mkdir -p build
  run git archive --format=tar.gz "--output=$archive" "${commit:-HEAD}"
  tpu_vm run scp "$archive" "$name:$packed" --worker=all
  local new=vit_jax_job/code.new
  on_workers run all "rm -rf $new && mkdir -p $new && tar -xzf $packed -C $new\
 && bash $new/launch/tpu_vm_worker.sh install"
}

# Starts the job unless it is running; `up` and `start` install the code first.
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

follow() { # worker 0 is JAX's process 0, which reports the progress
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
      ! job_runs || fail 'the job is running; stop it before you install.'
      install
      ;;
    train | start) train ;;
    up) # not joined by &&, which would disable `set -e` inside the functions
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
