#!/usr/bin/env bash
# The study of docs/explanation/study.md for one task: tune N = 16, run it to its plateau, tune every N at two switch points, and compare them from there.
#     bash examples/plateau/study.sh three|four [stage ...]    # stages: tune plateau rates compare; without one all, in this order
# Given again it goes on where it was stopped. About 80 minutes a task on two cores; `rates` and `compare` are matched in seconds, so that the machine
# should have nothing else to do. As many runs are made at a time as there are cores.
# POINTS=knee keeps to one switch point; OUT is the folder (runs/plateau/TASK); REHEARSE=1 tries everything in a few minutes, with results that mean nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
task=${1:?three or four}
shift
stages=${*:-tune plateau rates compare} points=${POINTS:-knee plateau} out=${OUT:-runs/plateau/$task}
recipe=examples/plateau/$task.yaml brorl=${BRORL:-brorl} python=${PYTHON:-python3}

# Every N, and its prompts a step: 64 at N = 16 and 16 at N = 512 are in the paper's proportion (512 and 128), and the others lie on a power law between.
numbers=(16 64 128 256 512 2048) prompts=(64 36 28 20 16 8)
tuning=400000 marks=100000,200000,400000 seeds=5 every=50 try_seconds=20 warm_steps=5000 all=() few=()
plateau=2000000 plateau_marks=100000,200000,400000,600000,800000,1000000,1250000,1500000,1750000,2000000
case $task in # the arm of `plateau` with the higher plateau (A is 1e-4, B is 3e-4), the steps that runs continue from, and for how long
  three) arm=A knee_step=200 plateau_step=500 knee_seconds=60 plateau_seconds=90 ;;
  four) arm=B knee_step=50 plateau_step=300 knee_seconds=100 plateau_seconds=45 ;;
  *) echo "unknown task: $task (three or four)" >&2 && exit 2 ;;
esac
if [ -n "${REHEARSE:-}" ]; then
  numbers=(16 64 512) prompts=(16 8 4) tuning=6000 marks=2000,4000,6000 seeds=2 every=5 try_seconds=8 warm_steps=100
  plateau=6000 plateau_marks=2000,4000,6000 knee_step=5 plateau_step=10 knee_seconds=12 plateau_seconds=12
  all=(--evaluation.num_prompts 16 --engine.clock cpu) few=(--prompts_per_step 8)  # a busy machine makes no step longer
fi
checkpoints=$out/n16/arms/$arm/seed-0/checkpoints

# Compare, or go on with a comparison: compare FOLDER OPTION...
compare() {
  local folder=$1
  shift
  if [ -f "$folder/compare.json" ]; then "$brorl" compare "$folder"; else "$brorl" compare "$recipe" "$@" ${all[@]+"${all[@]}"} --output-dir "$folder"; fi
}

joined() {
  local IFS=,
  echo "$*"
}

# The checkpoint of a switch point: checkpoint knee|plateau
checkpoint() {
  local step=${1}_step
  echo "$checkpoints/step-$(printf %06d "${!step}")"
}

tune() { # N = 16: learning rate, mini-batches, KL with resets of the reference, temperature
  compare "$out/tune" --match samples --budget $tuning --marks $marks --seeds 1 ${few[@]+"${few[@]}"} \
    --sweep optimizer.learning_rate=1e-4,3e-4,3e-5,1e-4,3e-4,1e-4,1e-4,1e-4 --sweep optimizer.mini_batches=4,4,4,1,1,4,4,4 \
    --sweep kl.coefficient=0,0,0,0,0,1e-2,1e-3,0 --sweep reference.reset_every=0,0,0,0,0,100,100,0 --sweep sampling.temperature=1,1,1,1,1,1,1,1.2
}

plateau() { # N = 16 on, until it hardly rises, with the two best rates
  compare "$out/n16" --match samples --budget $plateau --marks $plateau_marks --seeds 1 ${few[@]+"${few[@]}"} \
    --sweep optimizer.learning_rate=1e-4,3e-4 --checkpoint_every $every --keep_checkpoints 0
}

rates() { # every N gets the same four learning rates, on one seed: rates knee|plateau
  for i in "${!numbers[@]}"; do
    compare "$out/$1/rate-N${numbers[$i]}" --from "$(checkpoint "$1")" --match seconds --budget $try_seconds --marks 1 --seeds 1 \
      --rollouts_per_prompt "${numbers[$i]}" --prompts_per_step "${prompts[$i]}" --sweep optimizer.learning_rate=3e-5,1e-4,3e-4,1e-3 \
      --evaluation.num_samples 64 --evaluation.ks '[1, 16]'
  done
}

continued() { # every N with the best of its rates: continued knee|plateau
  local seconds=${1}_seconds s rate
  s=${!seconds}
  rate=$("$python" examples/plateau/rates.py "${numbers[@]/#/$out/$1/rate-N}")
  compare "$out/$1/compare" --from "$(checkpoint "$1")" --match seconds --budget "$s" --marks "$((s / 12)),$((s / 6)),$((s / 3)),$((s * 3 / 5)),$s" --seeds $seeds \
    --sweep rollouts_per_prompt="$(joined "${numbers[@]}")" --sweep prompts_per_step="$(joined "${prompts[@]}")" --sweep optimizer.learning_rate="$rate"
}

if [ "$task" = four ] && [ ! -d runs/plateau/four/model ]; then
  "$python" scripts/make_quickstart_model.py --output runs/plateau/four/model --num-numbers 4 --max-number 9 --steps $warm_steps
fi
for stage in $stages; do
  case $stage in
    tune | plateau) $stage ;;
    rates) for point in $points; do rates "$point"; done ;;
    compare) for point in $points; do continued "$point"; done ;;
    *) echo "unknown stage: $stage (tune, plateau, rates or compare)" >&2 && exit 2 ;;
  esac
done
