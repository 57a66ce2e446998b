"""All measurements of docs/explanation/benchmarks.md against peers: each part is one call of `peers.py`.

In: a folder. Out: one JSON file per part in it, and `benchmarks.md` with the tables of all parts. A part with a
complete file is not measured again, so an interrupted suite continues.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from results import Results
from table import markdown

HERE = Path(__file__).resolve().parent
NUM_RUNS = 5

# N, peers and seconds per cell are chosen so that everything takes about 35 minutes on one idle core. What is left out
# is a dash in the tables.
PARTS = {
    "full": "--settings full --num-rollouts 16,64,512 --peers ours,transformers,trl",
    "low": "--settings low --num-rollouts 16,64,512,2048",
    "trained": "--settings trained --num-rollouts 16,64,512,2048 --peers ours,transformers,trl,trl-checkpointing",
    "trained-16-prompts": (
        "--settings trained --num-rollouts 16,512 --prompts-per-step 16 --quantities step --peers ours,trl"
    ),
    "length-512": (
        "--settings low --response-tokens 512 --num-rollouts 16,64 --peers ours,transformers,vllm,trl --cell-s 20"
    ),
    "length-2048": (
        "--settings low --response-tokens 2048 --num-rollouts 16 --peers ours,transformers,vllm,trl --cell-s 20"
    ),
    "length-2048-ours": (
        "--settings low --response-tokens 2048 --num-rollouts 64 --quantities generation --peers ours --cell-s 20"
    ),
    "big-full": (
        "--settings big-full --num-rollouts 64,512 --quantities generation --peers ours,transformers,vllm --cell-s 30"
    ),
    "big-full-step": (
        "--settings big-full --num-rollouts 64,512 --quantities step --peers ours,trl --peer-limit 64 --cell-s 30"
    ),
    "big-low": "--settings big-low --num-rollouts 64,512 --peers ours --cell-s 30",
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the JSON files and benchmarks.md")
    parser.add_argument("--trained", help="a checkpoint of `brorl train` on the recipe quickstart")
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM, made by vllm_environment.sh")
    parser.add_argument("--parts", default=",".join(PARTS), help=", ".join(PARTS))
    parser.add_argument("--core", default=str(max(os.sched_getaffinity(0))))
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: no {sorted(unknown)}; choose from {', '.join(PARTS)}")
    if not args.trained:
        print("no --trained CHECKPOINT given: its parts are left out", file=sys.stderr)
        args.parts = [name for name in args.parts if "trained" not in name]
    return args


def _is_complete(path: Path) -> bool:
    return path.exists() and json.loads(path.read_text(encoding="utf-8"))["complete"]


def _measure(part: str, path: Path, args: argparse.Namespace) -> None:
    """Run one part in a separate process."""
    command = [sys.executable, str(HERE / "peers.py"), *PARTS[part].split(), "--runs", str(NUM_RUNS)]
    command += ["--core", args.core, "--output", str(path)]
    command += ["--trained", args.trained] if args.trained else []
    command += ["--vllm-python", args.vllm_python] if args.vllm_python else []
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Measure the missing parts, then write the tables of all parts."""
    args = _arguments()
    args.folder.mkdir(parents=True, exist_ok=True)
    paths = {part: args.folder / f"{part}.json" for part in args.parts}
    for part, path in paths.items():
        if _is_complete(path):
            print(f"{part}: already measured in {path}", file=sys.stderr)
            continue
        print(f"{part}: {PARTS[part]}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        _measure(part, path, args)
        print(f"{part}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    tables = markdown(Results.read(paths.values()), NUM_RUNS)
    (args.folder / "benchmarks.md").write_text(tables + "\n", encoding="utf-8")
    print(tables)


if __name__ == "__main__":
    main()
