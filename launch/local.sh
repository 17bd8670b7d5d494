#!/usr/bin/env bash
# Quickstart: creates an environment, pre-trains a small ViT on the digits of
# scikit-learn, kills and resumes the run, fine-tunes it at twice the
# resolution, evaluates it, predicts an image, and draws figures. Only packages
# are downloaded. If everything exists, the same command only prints the paths.
#
# Usage: bash launch/local.sh
#   VIT_JAX_VENV   directory of the environment (default .venv)
#   VIT_JAX_RUNS   directory of the runs        (default runs)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/environment.sh
# shellcheck disable=SC2119 # no additional requirements
make_environment
export JAX_PLATFORMS="${JAX_PLATFORMS-}" # by default, JAX chooses

runs="${VIT_JAX_RUNS:-runs}"
pretrained="$runs/quickstart"
finetuned="$runs/finetune_quickstart"

# Programs that one command compiles are loaded by the next.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$runs/.compiled}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0

step() { printf '\n=== %s\n' "$*"; }

train_and_evaluate() {
  step "Pre-training, killed after a third, as if the machine was lost"
  python -m vit_jax.train --config=configs/quickstart.py \
    --workdir="$pretrained" &
  trainer=$!
  while kill -0 "$trainer" 2>/dev/null && ! has_checkpoint "$pretrained"; do
    sleep 0.2
  done
  kill -KILL "$trainer" 2>/dev/null || true
  wait "$trainer" 2>/dev/null || true

  step "The same command again: it resumes from its checkpoint"
  python -m vit_jax.train --config=configs/quickstart.py --workdir="$pretrained"

  step "Fine-tuning at 32x32 pixels instead of 16x16"
  python -m vit_jax.finetune --config=configs/finetune_quickstart.py \
    --config.init_from="$pretrained" --workdir="$finetuned"

  step "Evaluating the fine-tuned model"
  python -m vit_jax.evaluate --checkpoint="$finetuned" --json |
    tee "$finetuned/evaluation.json"

  step "Predicting one image file"
  python - "$finetuned/digit.png" <<'PY'
import sys

import cv2
import sklearn.datasets

pixels = sklearn.datasets.load_digits().images[4]
cv2.imwrite(sys.argv[1], (pixels * 255 / 16).round().astype('uint8'))
PY
  python -m vit_jax.predict --checkpoint="$finetuned" --top=3 \
    "$finetuned/digit.png"
}

finished="$finetuned/local.finished" # written at the end
if [[ -f "$finished" ]]; then
  step "Everything exists in $runs; remove that directory to run it again"
else
  train_and_evaluate
  touch "$finished"
fi

python - "$finetuned/evaluation.json" <<'PY'
import json
import sys

accuracy = json.load(open(sys.argv[1]))['accuracy']
print(f'\ntest accuracy {accuracy:.2%}')
if accuracy < 0.95:
  sys.exit('expected at least 95 %')
PY

step "Figures, drawn at the end of each run"
ls "$finetuned/figures/rollout.png" >/dev/null
echo "curves: $pretrained/curves.png and $finetuned/curves.png"
echo "rollout of attention: $finetuned/figures/rollout.png"
echo "reports: $pretrained/report.html and $finetuned/report.html"
