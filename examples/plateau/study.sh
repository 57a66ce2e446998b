#!/usr/bin/env bash
# The study of docs/study.md for one task: tune N = 16, run it to its plateau, tune every N at each switch point, compare them there.
#     bash examples/plateau/study.sh three|four [stage ...]       # stages: tune plateau rates compare; all of them by default
# Everything goes to runs/plateau/TASK. Given again it goes on where it was stopped. About an hour a task on two cores, which should have nothing else
# to do during `rates` and `compare`: these are matched in seconds. The machine's free cores decide how many runs are made at a time.
set -euo pipefail
cd "$(dirname "$0")/../.."
task=${1:?three or four}
shift
stages=${*:-tune plateau rates compare}
out=runs/plateau/$task recipe=examples/plateau/$task.yaml
brorl=${BRORL:-brorl} python=${PYTHON:-python3}

numbers=(16 64 128 256 512 2048)  # N, and the prompts a step of each: 64 at N = 16 and 16 at N = 512 as the paper's 512 and 128, a power law for the others
prompts=(64 36 28 20 16 8)
case $task in
  three) rate=0.0001 knee_step=200 plateau_step=500 knee_seconds=60 plateau_seconds=120 ;;
  four) rate=0.0003 knee_step=100 plateau_step=300 knee_seconds=120 plateau_seconds=60 ;;
esac
checkpoints=$out/n16/arms/learning_rate=$rate/seed-0/checkpoints # of the rate with the higher plateau; the knee and the plateau are steps of it

# Compare, or go on with a comparison: compare FOLDER OPTION...
compare() {
  local folder=$1
  shift
  if [ -f "$folder/compare.json" ]; then "$brorl" compare "$folder"; else "$brorl" compare "$@" --output-dir "$folder"; fi
}

joined() { local IFS=,; echo "$*"; }

for stage in $stages; do
  case $stage in
    tune) # N = 16: learning rate, mini-batches, KL with resets of the reference, temperature
      if [ "$task" = four ] && [ ! -d "$out/model" ]; then
        "$python" scripts/make_quickstart_model.py --output "$out/model" --num-numbers 4 --max-number 9 --steps 5000
      fi
      compare "$out/tune" "$recipe" --match samples --budget 400000 --marks 100000,200000,400000 --seeds 1 \
        --sweep optimizer.learning_rate=1e-4,3e-4,3e-5,1e-4,3e-4,1e-4,1e-4,1e-4 --sweep optimizer.mini_batches=4,4,4,1,1,4,4,4 \
        --sweep kl.coefficient=0,0,0,0,0,1e-2,1e-3,0 --sweep reference.reset_every=0,0,0,0,0,100,100,0 \
        --sweep sampling.temperature=1,1,1,1,1,1,1,1.2
      ;;
    plateau) # N = 16 on until it hardly rises, with the two best rates
      compare "$out/n16" "$recipe" --match samples --budget 2000000 \
        --marks 100000,200000,400000,600000,800000,1000000,1250000,1500000,1750000,2000000 --seeds 1 \
        --sweep optimizer.learning_rate=1e-4,3e-4 --checkpoint_every 100 --keep_checkpoints 0
      ;;
    rates) # every N gets the same four learning rates, on one seed, at each switch point
      for point in knee plateau; do
        step=${point}_step
        for i in "${!numbers[@]}"; do
          compare "$out/$point/rate-N${numbers[$i]}" "$recipe" --from "$checkpoints/step-$(printf %06d "${!step}")" \
            --rollouts_per_prompt "${numbers[$i]}" --prompts_per_step "${prompts[$i]}" \
            --sweep optimizer.learning_rate=3e-5,1e-4,3e-4,1e-3 --match seconds --budget 20 --marks 1 --seeds 1 \
            --evaluation.num_samples 64 --evaluation.ks 1,16
        done
      done
      ;;
    compare) # the comparison: six N, five seeds, from each switch point
      for point in knee plateau; do
        step=${point}_step seconds=${point}_seconds
        folders=("${numbers[@]/#/$out/$point/rate-N}")
        s=${!seconds}
        compare "$out/$point/compare" "$recipe" --from "$checkpoints/step-$(printf %06d "${!step}")" \
          --sweep rollouts_per_prompt="$(joined "${numbers[@]}")" --sweep prompts_per_step="$(joined "${prompts[@]}")" \
          --sweep optimizer.learning_rate="$("$python" examples/plateau/rates.py "${folders[@]}")" \
          --match seconds --budget "$s" --marks "$((s / 12)),$((s / 4)),$((s / 2)),$s" --seeds 5
      done
      ;;
    *)
      echo "unknown stage: $stage" >&2
      exit 2
      ;;
  esac
done
