#!/usr/bin/env bash
# Checks and measures brorl on one CUDA device: bash benchmarks/gpu/run.sh [folder for the result]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-benchmarks/gpu}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python3 benchmarks/gpu/measure.py --device cuda --output "$out/result.json" 2>&1 | tee "$out/result.log"
