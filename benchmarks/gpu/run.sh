#!/usr/bin/env bash
# Checks and measures brorl on one CUDA device: bash benchmarks/gpu/run.sh [folder for the results] [options of measure.py]
# Stops before 10 minutes are over (LIMIT seconds); another call with the same folder continues.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/gpu} limit=${LIMIT:-550}
shift $(($# > 0))
mkdir -p "$out"
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
for _ in 1 2 3; do # a part that loses the device (4) or ends the process (a signal) needs a new process
  python3 benchmarks/gpu/measure.py "$out" --seconds $((limit - SECONDS)) "$@" 2>&1 | tee -a "$out/result.log"
  code=${PIPESTATUS[0]}
  [ "$code" -eq 4 ] || [ "$code" -ge 128 ] || break
done
exit "$code"
