"""A training step with long responses on a CPU: `brorl train` and TRL's GRPOTrainer, one thread each.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/long_step.py MODEL --rollouts 16 --tokens 1024

MODEL is the folder of a pretrained model, such as SmolLM2-135M (see README.md). Both sample the same number of
responses of exactly so many tokens to the same prompts, in float32, and train on all of them. Each has a process of its
own. Prints a line of JSON for each, and a table: seconds of the step and its parts, and peak memory.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from gpu.real_step import RealStep
from harness import table
from measurement import Peer

_COLUMNS = ("peer", "step (s)", "sampling (s)", "tokens", "distinct", "peak (GB)", "predicted (GB)")


def main() -> None:
    """Measure the steps on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rollouts", type=int, default=16, help="N")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of a step")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a response")
    parser.add_argument("--steps", type=int, default=1, help="steps; the first one counts only if it is alone")
    parser.add_argument("--micro-batch", type=int, default=4, help="responses of a forward pass of TRL's learner")
    parser.add_argument("--memory-gib", type=int, default=4, help="limit of our engine")
    parser.add_argument("--peers", default="ours,trl,trl-checkpointing")
    args = parser.parse_args()
    step = RealStep(
        str(args.model.resolve()), args.rollouts, args.prompts, args.tokens, args.memory_gib, args.micro_batch,
        args.steps, 1e9, "cpu", seed=0, fixed_length=True,
    )  # fmt: skip
    rows = []
    peers: list[Peer] = args.peers.split(",")
    for peer in peers:
        facts = step.measure(peer).facts
        print(json.dumps({"peer": peer, **facts}), flush=True)
        predicted, distinct = facts["predicted_bytes"], facts["unique_fraction"]
        rows.append((
            peer, f"{facts['step_s']:.1f}", f"{facts['parts']['generation']:.1f}", f"{facts['sampled_tokens']:,.0f}",
            "" if distinct is None else f"{distinct:.2f}", f"{facts['peak_bytes'] / 1e9:.2f}",
            f"{predicted / 1e9:.2f}" if predicted else "",
        ))  # fmt: skip
    print(table(_COLUMNS, rows))


if __name__ == "__main__":
    main()
