"""The peers `trl` and `trl-checkpointing`: a real GRPOTrainer.train().

The options favor speed: no reference model (beta 0), no vLLM, and one optimizer step per generation, which saves TRL
the second forward pass for old log-probs. On a GPU it computes in bfloat16, on a CPU in float32. `trl-checkpointing`
has gradient checkpointing, TRL's default, which is slower and needs less memory; `trl` has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from measurement import Job, Run, Workload
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from worker import Turns

# The model stays practically the same in all steps; the size of an update does not change its cost.
LEARNING_RATE = 1e-7


class StepTimer(TrainerCallback):
    """Starts each optimizer step at a turn of the scheduler, and reports its time."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._start = self._cpu_start = 0.0
        self.lengths: list[int] = []
        self.rewards: list[float] = []
        self.generation_s = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Called before the step's prompts are sampled."""
        self.lengths, self.rewards, self.generation_s = [], [], 0.0
        self._turns.wait()
        _synchronize()
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called after the optimizer's step."""
        _synchronize()
        seconds = time.perf_counter() - self._start
        cpu_seconds = time.process_time() - self._cpu_start
        mean_reward = sum(self.rewards) / max(1, len(self.rewards))
        self._turns.reply(
            Run(
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                sampled_tokens=sum(self.lengths),
                parts={"generation": self.generation_s},
                facts={"mean_reward": mean_reward},
            )
        )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(job: Job, workload: Workload, turns: Turns) -> None:
    """Train one step per turn.

    Raises:
        ValueError: If the job is generation alone; `transformers` measures that.
    """
    if job.quantity != "step":
        raise ValueError(f"trl has no {job.quantity} to measure apart from transformers'")
    model = AutoModelForCausalLM.from_pretrained(workload.model_dir, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(workload.model_dir, padding_side="left")
    _check_tokens(tokenizer, workload)
    turns.ready()
    timer = StepTimer(turns)
    rows = [
        {"prompt": p["text"], "reference": p["reference"]}
        for p in workload.prompts[: job.num_turns * job.prompts_per_step]
    ]
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=_reward(workload, timer),
        args=_config(job, workload),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[timer],
    )
    _time_generation(trainer, timer)
    trainer.train()


def _config(job: Job, workload: Workload) -> GRPOConfig:
    num_rollouts = job.num_rollouts * job.prompts_per_step
    micro_batch = min(job.micro_batch, num_rollouts)
    has_end = workload.domain == "math"  # the random models have no end token
    fixed = {"min_new_tokens": workload.max_new_tokens} if workload.fixed_length and has_end else None
    return GRPOConfig(
        output_dir=str(Path(workload.folder) / f"trl-{job.peer}-{job.num_rollouts}"),
        use_cpu=job.device == "cpu",
        bf16=job.device != "cpu",
        fp16=False,
        num_generations=job.num_rollouts,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=num_rollouts // micro_batch,
        gradient_checkpointing=job.peer == "trl-checkpointing",
        max_steps=job.num_turns,
        max_completion_length=workload.max_new_tokens,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        generation_kwargs=fixed,
        beta=0.0,
        num_iterations=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        shuffle_dataset=False,
        use_vllm=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )


def _time_generation(trainer: GRPOTrainer, timer: StepTimer) -> None:
    """Also time the sampling inside the step; it wraps a private method."""
    generate = trainer._generate_single_turn

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = generate(*args, **kwargs)
        timer.generation_s += time.perf_counter() - start
        return result

    trainer._generate_single_turn = timed


def _reward(workload: Workload, timer: StepTimer) -> Callable[..., list[float]]:
    if workload.domain == "parity":
        return _parity(timer)
    if workload.domain == "math":
        return _boxed(timer)
    return _countdown(workload.eos_token_id, timer)


def _parity(timer: StepTimer) -> Callable[..., list[float]]:
    """Return a reward that makes nearly every group mixed: 1 if the sum of the token ids is even."""

    def parity(completion_ids: list[list[int]], **_: Any) -> list[float]:
        timer.lengths = [len(ids) for ids in completion_ids]
        timer.rewards = [float(sum(ids) % 2 == 0) for ids in completion_ids]
        return timer.rewards

    return parity


def _boxed(timer: StepTimer) -> Callable[..., list[float]]:
    """Return a reward that is 1 if the response has the reference in a box."""

    def boxed(completions: list[str], completion_ids: list[list[int]], reference: list[str], **_: Any) -> list[float]:
        timer.lengths = [len(ids) for ids in completion_ids]
        timer.rewards = [
            float(f"\\boxed{{{answer}}}" in text) for answer, text in zip(reference, completions, strict=True)
        ]
        return timer.rewards

    return boxed


def _countdown(eos_token_id: int, timer: StepTimer) -> Callable[..., list[float]]:
    """Return the reward of our countdown verifier; a response without an end token gets 0."""
    from brorl.prompts.prompt import Prompt
    from brorl.verification.domains.countdown import CountdownVerifier

    verifier = CountdownVerifier()

    def countdown(
        completions: list[str],
        completion_ids: list[list[int]],
        reference: list[str],
        **_: Any,
    ) -> list[float]:
        prompts = {line: Prompt(line, line, (0,), line, "countdown") for line in set(reference)}
        timer.lengths = [len(ids) for ids in completion_ids]
        timer.rewards = [
            verifier.verify(prompts[line], text).score if ids[-1] == eos_token_id else 0.0
            for line, text, ids in zip(reference, completions, completion_ids, strict=True)
        ]
        return timer.rewards

    return countdown


def _check_tokens(tokenizer: Any, workload: Workload) -> None:
    """Check that TRL, which tokenizes the text, trains on the tokens of the other peers."""
    for prompt in workload.prompts:
        ids = tokenizer(text=[prompt["text"]])["input_ids"][0]
        if ids != prompt["token_ids"]:
            raise ValueError(f"the tokenizer makes {ids} of prompt {prompt['id']}, not its tokens")
