"""A training step of a real model: `brorl train`, and TRL's GRPOTrainer without vLLM.

Both train on the same prompts with the same numbers: one update of a step, bfloat16 on a GPU, a learning rate that
leaves the model as it is. Each has a process of its own, which runs this file: peer and step in, a line of JSON with
the runs and the peak memory out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the program imports the benchmarks by their names
from build_workload import build, workload_of
from gpu.device import Device
from harness import Findings
from measurement import Cell, Job, Peer, Run, Workload
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from worker import DismissedError

from brorl.model.memory_prediction import predict_memory
from brorl.model.memory_settings import MemorySettings
from brorl.model.memory_settings import Workload as Sizes
from brorl.model.source import find_model
from brorl.prompts.question import Question
from brorl.prompts.rendering import render
from brorl.prompts.settings import PromptFormat

_LEARNING_RATE = 1e-7  # of TRL's side too
_NUM_SUMS = 512
_FORMAT = {"template": "{prompt}\n\nPut your final answer within \\boxed{}.", "chat": "auto"}
_ROWS = "sums.jsonl"
_NEEDS = "TRL cannot be imported (wheels: trl, datasets, accelerate); this is our side alone"
_RESULT = "RESULT "
_SAID = 20  # lines of the log that are kept


@dataclass(frozen=True)
class RealStep:
    """A training step of a pretrained model on sums; of the shipped model on its puzzles, without a folder."""

    folder: str  # of the model; empty for the shipped one
    num_rollouts: int  # of each prompt, N
    num_prompts: int  # of a step, P
    max_new_tokens: int  # of a response
    memory_gib: int  # limit of our engine
    micro_batch: int  # responses of TRL's forward pass
    num_steps: int  # most steps, with the first one, which is a warm-up
    seconds: float  # for all steps: none is started that would exceed them, but one always counts
    device: str  # in PyTorch
    seed: int
    # whether every response has `max_new_tokens`, and our side trains on all groups too: both then do the same work
    fixed_length: bool = False

    @property
    def name(self) -> str:
        """Its rollouts, prompts and tokens."""
        return f"{self.num_rollouts} x {self.num_prompts}, {self.max_new_tokens} tokens"

    def measure(self, peer: Peer) -> Findings:
        """Measure the steps of a peer in a new process."""
        if peer != "ours" and not (find_spec("trl") and find_spec("datasets")):
            return Findings(skipped=_NEEDS)
        Device(self.device).bytes_in_use()  # returns the reserve of this process
        answer = self._answer(peer)
        runs = [Run.of(run) for run in answer["runs"]]
        warmups, counted = (runs[:1], runs[1:]) if len(runs) > 1 else ([], runs)
        cell = Cell(self.job(peer, ""), counted, warmups, 0, answer["peak_bytes"])
        # Means: groups that one step samples beyond its own spare the next one a round, or all of its sampling.
        parts = {name: fmean(run.parts.get(name, 0.0) for run in counted) for run in counted for name in run.parts}
        facts = {
            "step_s": fmean(run.seconds for run in counted),
            "seconds": [run.seconds for run in runs],
            "parts": parts,
            "rounds": fmean(run.facts["rounds"] for run in counted) if "rounds" in counted[0].facts else None,
            "mean_reward": cell.fact("mean_reward"),
            "sampled_tokens": fmean(run.sampled_tokens for run in cell.runs),
            "unique_fraction": cell.unique_fraction,
            "peak_bytes": cell.peak_bytes,
            "predicted_bytes": answer["predicted_bytes"] if peer == "ours" else None,
        }
        return Findings(facts=facts | {"said": answer["said"], "setting": asdict(self)})

    def job(self, peer: Peer, folder: str) -> Job:
        """Return the job of a peer with the workload of a folder."""
        return Job(
            peer, "step", folder, self.num_rollouts, self.num_prompts, self.num_steps, self.micro_batch, self.device
        )

    def _answer(self, peer: Peer) -> dict[str, Any]:
        """Run a peer in a process; return what it reports.

        Raises:
            RuntimeError: With the end of its output, if it reports nothing.
        """
        command = [sys.executable, __file__, peer, json.dumps(asdict(self))]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with TemporaryDirectory() as scratch:
            ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=scratch, env=environment)
        lines = [line for line in ended.stdout.splitlines() if line.startswith(_RESULT)]
        if not lines:
            raise RuntimeError((ended.stdout + ended.stderr)[-3000:])
        answer: dict[str, Any] = json.loads(lines[-1].removeprefix(_RESULT))
        return answer

    def workload(self, folder: Path) -> Workload:
        """Write the workload of both peers into a folder, with the rows of the prompts."""
        num_prompts = self.num_steps * self.num_prompts
        if not self.folder:
            source = find_model("quickstart").path
            return build("trained", str(folder), num_prompts, self.max_new_tokens, model=source)
        (folder / "model").symlink_to(Path(self.folder).resolve(), target_is_directory=True)
        rows = sums(_NUM_SUMS, self.seed)
        (folder / _ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.folder))
        questions = [Question(str(i), row["question"], row["answer"], "math") for i, row in enumerate(rows)]
        prompts = [
            {"id": p.id, "text": p.text, "token_ids": list(p.token_ids), "reference": p.reference}
            for p in render(questions, PromptFormat(**_FORMAT), tokenizer)
        ]
        workload = workload_of(
            model, "real", folder=str(folder), domain="math", prompts=prompts, max_new_tokens=self.max_new_tokens,
            eos_token_id=int(tokenizer.eos_token_id), fixed_length=self.fixed_length, entropy_nats=float("nan"),
            head_scale=1.0,
        )  # fmt: skip
        workload.write()
        return workload

    def recipe(self, workload: Workload) -> dict[str, Any]:
        """Return the settings of `brorl train`."""
        on_cpu = self.device == "cpu"
        settings: dict[str, Any] = {
            "model": str(workload.model_dir),
            "device": self.device,
            "seed": self.seed,
            "rollouts_per_prompt": self.num_rollouts,
            "prompts_per_step": self.num_prompts,
            "steps": self.num_steps,
            "budget": {"unit": "seconds", "limit": self.seconds},
            "report": False,
            "evaluation": {"num_prompts": 0},
            "sampling": {"temperature": 1.0, "max_new_tokens": self.max_new_tokens},
            "optimizer": {"learning_rate": _LEARNING_RATE, "mini_batches": 1},
            "dtype": "float32" if on_cpu else "bfloat16",
            "importance": {"correction": "none" if on_cpu else "truncate"},
            "engine": {"memory_gib": self.memory_gib},
        }
        if self.fixed_length:
            settings["dynamic_sampling"] = {"enabled": False}
            settings["sampling"]["min_new_tokens"] = self.max_new_tokens - 1  # the last one may be the end token
        if workload.domain == "countdown":
            return settings
        rows = {"path": str(Path(workload.folder) / _ROWS), "prompt_column": "question", "answer_column": "answer"}
        return settings | {
            "data": {"sources": [rows | {"domain": "math"}], "held_out_fraction": 0.0},
            "prompt": _FORMAT,
        }

    def predicted(self, workload: Workload) -> int:
        """Return the predicted peak memory of `brorl train`."""
        recipe = self.recipe(workload)
        settings = MemorySettings(recipe["dtype"], self.memory_gib << 30, device=self.device)
        longest = max(len(prompt["token_ids"]) for prompt in workload.prompts)
        sizes = Sizes(longest, self.max_new_tokens, self.num_rollouts * self.num_prompts, self.num_prompts)
        config = AutoConfig.from_pretrained(self.folder or find_model("quickstart").path)
        return predict_memory(config, settings, sizes).total_bytes


def sums(num_rows: int, seed: int) -> list[dict[str, str]]:
    """Return sums of 2 or 3 numbers of 1 or 2 digits, as questions with their answers (Reasoning Gym's `chain_sum`)."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_rows):
        first, *rest = rng.integers(*[(0, 10), (10, 100)][rng.integers(2)], rng.integers(2, 4)).tolist()
        signs = rng.choice([1, -1], len(rest)).tolist()
        terms = "".join(f" {'+' if sign > 0 else '-'} {number}" for sign, number in zip(signs, rest, strict=True))
        question = f"State the final answer to the following arithmetic problem: {first}{terms} ="
        rows.append({"question": question, "answer": str(first + int(np.dot(signs, rest)))})
    return rows


class Steps:
    """The turns of a peer in this process: its steps until the limits are reached."""

    def __init__(self, step: RealStep) -> None:
        self._step = step
        self.runs: list[Run] = []

    def ready(self) -> None:
        """Do nothing: the model counts for the peak."""

    def wait(self) -> None:
        """Return if there is time for another step.

        Raises:
            DismissedError: If there is not.
        """
        seconds = [run.seconds for run in self.runs]
        if len(seconds) >= self._step.num_steps or sum(seconds) + sum(seconds[-1:]) > self._step.seconds:
            raise DismissedError

    def reply(self, run: Run) -> None:
        """Keep a run."""
        self.runs.append(run)


def train_steps(step: RealStep, workload: Workload, steps: Steps) -> list[str]:
    """Take the steps of `brorl train`, from its own metrics; return what it said before and while it took them."""
    from brorl import train

    recipe = step.recipe(workload)
    output = str(Path(workload.folder) / "run")
    result = train("quickstart" if workload.domain == "countdown" else {}, progress=False, output_dir=output, **recipe)
    if not any(record.update for record in result.metrics):
        raise RuntimeError(f"brorl train made no update: {result.message}")
    for record in result.metrics:
        if record.update:
            sampling = record.sampling
            seconds = {name: value for name, value in asdict(record.seconds).items() if value is not None}
            facts = {"rounds": sampling.rounds, "mean_reward": sampling.reward}
            steps.reply(
                Run(
                    seconds.pop("total"), float("nan"), sampling.sampled_tokens, sampling.unique_tokens,
                    parts=seconds, facts=facts,
                )
            )  # fmt: skip
    return (result.path / "run.log").read_text(encoding="utf-8").partition("\n\n")[0].splitlines()[:_SAID]


def main() -> None:
    """Measure the peer and the step on the command line, in the working folder."""
    peer: Peer = sys.argv[1]  # type: ignore[assignment]
    step = RealStep(**json.loads(sys.argv[2]))
    workload, steps, device = step.workload(Path.cwd()), Steps(step), Device(step.device)
    if peer != "ours":
        import trl_step
    said: list[str] = []
    before = device.bytes_in_use()
    device.reset_peak()
    if peer != "ours":
        with suppress(DismissedError):
            trl_step.measure(step.job(peer, workload.folder), workload, steps)
    else:
        said = train_steps(step, workload, steps)
    report = {
        "runs": [asdict(run) for run in steps.runs],
        "peak_bytes": device.peak_bytes() - before,
        "predicted_bytes": step.predicted(workload),
        "said": said,
    }
    print(_RESULT + json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
