#!/usr/bin/env bash
# Measures brorl on one CUDA device, or checks that it is exact there:
#     bash benchmarks/gpu/run.sh FOLDER --model MODEL          # speed and memory (MODEL: the folder of SmolLM2-135M-Instruct)
#     bash benchmarks/gpu/run.sh FOLDER exactness              # exactness, in three processes side by side
#     bash benchmarks/gpu/run.sh FOLDER learner --model MODEL  # the learner's passes, each group with a limit of its own
# Further options are those of measure.py. Stops before 9 minutes are over (LIMIT seconds); another call with the same folder and options continues.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-runs/gpu} limit=${LIMIT:-530}
shift $(($# > 0))
groups=('^(?!exactness)')
if [ "${1:-}" = exactness ]; then
  shift
  groups=('exactness: (llama|qwen2),' 'exactness: (qwen3|mistral|long)' 'exactness: mamba')
fi
if [ "${1:-}" = learner ]; then
  shift
  groups=()
  learner=1
fi
mkdir -p "$out"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1  # some parts run in other folders
measure() {
  local code=3 left
  for _ in 1 2 3; do # a part that loses the device (4) or ends the process (a signal) needs a new process
    left=$((limit - SECONDS))
    [ "$left" -gt 0 ] || break
    timeout -k 10 $((left + 5)) python3 benchmarks/gpu/measure.py "$out" --seconds "$left" --parts "$@"
    code=$?
    [ "$code" -eq 4 ] || [ "$code" -gt 128 ] || break
  done
  return "$code"
}
code=0 processes=()
if [ "${learner:-}" ]; then # one after another: seconds, then the parts
  while read -r seconds parts; do
    limit=$((SECONDS + seconds))
    measure "$parts" "$@" 2>&1 | tee -a "$out/result.log" || code=$?
  done <<'END'
60 exactness: (llama|qwen3), learner (float32|bfloat16)
100 learning: (SmolLM2|135M) .* by packed, (compiled|recorded)
90 step: 128
120 learning: 1.5B .* by packed, (compiled|recorded)$
200 exactness: long
END
fi
for parts in "${groups[@]}"; do
  measure "$parts" "$@" > >(tee -a "$out/result.log") 2>&1 &
  processes+=($!)
done
for process in "${processes[@]}"; do
  wait "$process" || code=$?
done
exit "$code"
