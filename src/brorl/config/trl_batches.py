"""The batches, the number of updates and the learning rate of a config of TRL, as those of a recipe.

TRL generates `generation_batch_size` samples at once, divides them into `steps_per_generation` micro-batches, and makes
an update of every `gradient_accumulation_steps` of them; `num_iterations` repeats all of it. Its steps are updates.
Numbers of steps below 1 are fractions of all updates, as in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from typing import Any, NamedTuple

from brorl.config.conversion import one_of
from brorl.errors import UserError

_SCHEDULE = {
    "constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine",
    "cosine_with_min_lr": "cosine", "cosine_warmup_with_min_lr": "cosine", "polynomial": "linear",
    "warmup_stable_decay": "",  # as its decay
}  # fmt: skip
_UNREAD = {"num_cycles": 0.5, "power": 1.0, "warmup_type": "linear", "warmup_lr_rate": None}  # with the usual value


class Batches(NamedTuple):
    """How TRL's batches become steps."""

    prompts_per_step: int  # prompts that a step trains on
    mini_batches: int  # updates of a step here
    updates: Fraction  # updates of TRL on the samples of a step, those of all iterations
    total: int | None  # updates of the whole run in TRL; None if the number of prompts is unknown
    an_epoch: int | None  # updates of an epoch in TRL; None if the number of prompts is unknown

    def steps(self, updates: float) -> int:
        """Return the steps of some updates of TRL, at least 1."""
        return max(round(updates / self.updates), 1)

    def updates_of(self, given: Any) -> int | None:
        """Return a number of updates, which below 1 is a fraction of all; None if that is unknown."""
        value = float(given)
        if value >= 1 or value == 0:
            return int(value)
        return None if self.total is None else ceil(self.total * value)


def batches(every: Mapping[str, Any], num_prompts: int | None, remarks: list[str]) -> Batches:
    """Read the sizes of the batches, and the number of updates.

    Args:
        every: The config with TRL's defaults.
        num_prompts: Prompts of the training data; None if unknown.
        remarks: Gets what is chosen.
    """
    group, accumulated = int(every["num_generations"]), int(every["gradient_accumulation_steps"])
    micro, iterations = int(every["per_device_train_batch_size"]), int(every["num_iterations"])
    if every.get("generation_batch_size"):
        rounds = max(int(every["generation_batch_size"]) // micro, 1)
    else:
        rounds = int(every.get("steps_per_generation") or accumulated)
    updates = max(Fraction(rounds, accumulated), Fraction(1))  # of the samples of a step
    prompts = max(micro * max(rounds, accumulated) // group, 1)
    mini_batches = min(max(round(updates), 1), prompts)
    remarks.append(f"prompts_per_step = {prompts} is for one process; multiply it by the number of processes")
    if updates != mini_batches:
        remarks.append(
            f"TRL makes {float(updates):g} updates on these prompts, and optimizer.mini_batches {mini_batches}"
        )
    if iterations > 1:
        remarks.append("num_iterations: one pass is made over the rollouts; raise optimizer.mini_batches instead")
    an_epoch, total = None, int(every.get("max_steps") or -1)
    if num_prompts is not None:
        generated = max(micro * rounds // group, 1)  # prompts of a generation
        an_epoch = max(ceil(Fraction(num_prompts // generated * rounds * iterations, accumulated)), 1)
    epochs = Fraction(str(every["num_train_epochs"]))
    if total <= 0 and an_epoch is not None:
        total = ceil(epochs * an_epoch)
        remarks.append(
            f"steps = {ceil(total / (updates * iterations))}: num_train_epochs = {float(epochs):g} over "
            f"{num_prompts:,} prompts, {prompts} a step"
        )
    elif total <= 0:
        remarks.append(
            f"set steps: num_train_epochs = {float(epochs):g} is {float(epochs):g} x (number of prompts) / {prompts} "
            "steps, and the data was not read"
        )
    return Batches(prompts, mini_batches, updates * iterations, total if total > 0 else None, an_epoch)


def intervals(every: Mapping[str, Any], found: Batches, remarks: list[str]) -> dict[str, Any]:
    """Return the steps of the run, and those between checkpoints and evaluations."""
    settings: dict[str, Any] = {}
    if found.total is not None:
        settings["steps"] = ceil(found.total / found.updates)
    for what, name, off in (("save", "checkpoint_every", {}), ("eval", "evaluation.every", {"evaluation.every": 0})):
        strategy, given = str(every.get(f"{what}_strategy")), every.get(f"{what}_steps")
        if strategy == "no":
            settings |= off
        elif strategy == "epoch" or given:
            updates = found.an_epoch if strategy == "epoch" else found.updates_of(given)
            if updates is None:
                wanted = "an epoch" if strategy == "epoch" else f"{what}_steps = {given}, a fraction of all steps"
                remarks.append(f"set {name}: the config has {wanted}, and the number of prompts is unknown")
            else:
                settings[name] = found.steps(updates)
    return settings


def learning_rate(every: Mapping[str, Any], found: Batches, remarks: list[str]) -> dict[str, Any]:
    """Return the settings of the learning rate: its warm-up, its fall, and its end.

    Raises:
        UserError: If its schedule has no counterpart.
    """
    kind, rate = str(every["lr_scheduler_type"]), float(every["learning_rate"])
    options = _options(every)
    schedule = one_of(_SCHEDULE, "lr_scheduler_type")(kind)
    if kind == "warmup_stable_decay":
        decay = options.get("decay_type", "cosine")
        schedule = one_of({"linear": "linear", "cosine": "cosine"}, "lr_scheduler_kwargs.decay_type")(decay)
    for name, usual in _UNREAD.items():
        if options.get(name, usual) != usual:
            raise UserError(
                f"lr_scheduler_kwargs.{name} = {options[name]} has no counterpart; remove it, or use {name} = {usual}"
            )
    settings: dict[str, Any] = {"optimizer.learning_rate": rate, "optimizer.schedule": schedule}
    warmup = 0 if kind == "constant" else _warmup(every, found, remarks)
    if warmup:
        settings["optimizer.warmup_updates"] = max(round(warmup * found.mini_batches / found.updates), 1)
    if schedule == "constant":
        return settings
    settings["optimizer.final_rate"] = _end(kind, options, rate)
    if (start := _start_of_decay(kind, options, warmup, found, remarks)) > 0:
        settings["optimizer.decay_from"] = round(start, 6)
    return settings


def _options(every: Mapping[str, Any]) -> dict[str, Any]:
    given = every.get("lr_scheduler_kwargs")
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise UserError(f"lr_scheduler_kwargs: expected a mapping or JSON text, got {given!r}") from error
    prefix = "lr_scheduler_kwargs."
    flat = {key.removeprefix(prefix): value for key, value in every.items() if key.startswith(prefix)}
    return (given or {}) | flat


def _warmup(every: Mapping[str, Any], found: Batches, remarks: list[str]) -> int:
    """Return the updates of the warm-up in TRL; `warmup_ratio` is the older name of a fraction."""
    key = "warmup_steps" if float(every.get("warmup_steps") or 0) else "warmup_ratio"
    given = every.get(key) or 0
    updates = found.updates_of(given)
    if updates is None:
        remarks.append(f"set optimizer.warmup_updates: {key} = {given} is a fraction of an unknown number of updates")
    return updates or 0


def _end(kind: str, options: Mapping[str, Any], rate: float) -> float:
    """Return the last learning rate as a fraction of the first."""
    if kind == "polynomial":
        return float(options.get("lr_end", 1e-7)) / rate
    if options.get("min_lr") is not None:
        return float(options["min_lr"]) / rate
    found = options.get("min_lr_rate", options.get("min_lr_ratio"))
    if found is None and kind.endswith("min_lr"):
        raise UserError(f"lr_scheduler_type = {kind} needs min_lr or min_lr_rate in lr_scheduler_kwargs; add one")
    return float(found or 0.0)


def _start_of_decay(kind: str, options: Mapping[str, Any], warmup: int, found: Batches, remarks: list[str]) -> float:
    """Return the fraction of the updates at which the learning rate begins to fall."""
    stable = 0
    if kind == "warmup_stable_decay":
        decay = int(options["num_decay_steps"])
        stable = options.get("num_stable_steps", (found.total or 0) - warmup - decay)
    if found.total is None:
        if warmup or kind == "warmup_stable_decay":
            remarks.append("set optimizer.decay_from to the fraction of the steps at which the learning rate falls")
        return 0.0
    return min((warmup + int(stable)) / found.total, 0.999)
