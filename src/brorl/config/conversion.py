"""Converts another trainer's config with a table of its keys; TRL and verl add what depends on several keys.

Every key that is not read is named: as left out if it changes what is trained, otherwise among the other keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

from brorl.errors import UserError
from brorl.prompts.public_data import layouts_of
from brorl.trackers import TrackerName

Action = Callable[[Any], Any] | Mapping[Any, Any]  # turns the other trainer's value into ours
Counterpart = tuple[str, Action] | tuple[str, Action, Any]  # (name in a recipe, action[, the other trainer's default])

BFLOAT16 = {"dtype": "bfloat16", "importance.correction": "truncate", "optimizer.old_logprobs": "recompute"}
"""Settings of a learner that computes in bfloat16; the correction is for the difference to the engine."""
_OF_THE_CONSOLE = ("console", "none", "file")  # loggers that brorl always has: every run prints and stores its metrics


@dataclass(frozen=True)
class Conversion:
    """The settings of a recipe that do what a config of another trainer did."""

    trainer: Literal["TRL", "verl"]
    settings: Mapping[str, Any]  # dotted name -> value
    without_counterpart: tuple[str, ...]  # keys that change what is trained and have no counterpart
    not_read: tuple[str, ...]  # all other keys that are not read
    remarks: tuple[str, ...]  # sentences on choices, and on work that is left to the user


def all_tokens(value: Any) -> int:
    """Return top-k, with 0 if all tokens are kept; other trainers write 0, -1 or null."""
    return max(int(value or 0), 0)


def names(value: Any) -> list[str]:
    """Return a list of names; a single name becomes a list of one."""
    return [value] if isinstance(value, str) else list(value)


def trackers(value: Any) -> list[str]:
    """Return the loggers of a config that are trackers here."""
    return [name for name in names(value) if name in get_args(TrackerName)]


def file_source(path: str, subset: Any = None, split: Any = None, **columns: Any) -> dict[str, Any]:
    """Return a source of questions. A public dataset gets its layout instead of columns."""
    source = {"path": path} | ({"subset": subset} if subset else {}) | ({"split": split} if split else {})
    layouts = layouts_of(path)
    return source | ({"layout": layouts[0]} if len(layouts) == 1 else {k: v for k, v in columns.items() if v})


def distinct_names(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give sources distinct names: if two paths end alike, the later source gets a number."""
    stems = [Path(str(source["path"])).stem for source in sources]
    return [
        source if stems.index(stem) == place else {**source, "name": f"{stem}-{place + 1}"}
        for place, (stem, source) in enumerate(zip(stems, sources, strict=True))
    ]


class Converter:
    """A config that remembers which keys were read, and collects settings and remarks."""

    def __init__(self, given: Mapping[str, Any], table: Mapping[str, Counterpart]) -> None:
        self.given, self._read = given, set[str]()
        self.settings: dict[str, Any] = {}
        self.remarks: list[str] = []
        for key, (name, action, *default) in table.items():
            if (value := self(key, *default)) is not None:
                self.settings[name] = action(value) if callable(action) else self.one_of(key, action, value)

    def __call__(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default if the key is missing or null."""
        self._read.add(key)
        return default if self.given.get(key) is None else self.given[key]

    def one_of(self, key: str, table: Mapping[Any, Any], default: Any) -> Any:
        """Return the table's entry for a key's value; a value without an entry is an error."""
        if (value := self(key, default)) not in table:
            raise UserError(
                f"{key}: {value!r} has no counterpart; the values that have one: {', '.join(map(str, table))}"
            )
        return table[value]

    def within(self, key: str) -> dict[str, Any]:
        """Return the entries of a mapping by the rest of their dotted names."""
        inner = {name.removeprefix(f"{key}."): self(name) for name in self.given if name.startswith(f"{key}.")}
        return {name: value for name, value in inner.items() if value is not None}

    def adapters(self, rank: Any, alpha: Any, modules: Any) -> None:
        """Set the `lora` section."""
        self.settings |= {"lora.rank": int(rank), "lora.alpha": float(alpha)}
        if modules:
            self.settings["lora.target_modules"] = names(modules)

    def say_epochs(self, key: str, epochs: Fraction, num_prompts: int | None, steps: int | None) -> None:
        """Say how many steps the epochs became, or how to compute them if the number of prompts is unknown."""
        prompts, number = self.settings["prompts_per_step"], f"{float(epochs):g}"
        self.remarks.append(
            f"set steps: {key} = {number} is {number} x (number of prompts) / {prompts} steps, and the data was not "
            "read"
            if steps is None
            else f"steps = {steps}: {key} = {number} over {num_prompts:,} prompts, {prompts} a step"
        )

    def set_schedule(self, warmup: int | Fraction | None, steps: int | Fraction | None, end: float) -> None:
        """Set the warm-up, the decay and the end of the learning rate.

        `warmup` is in steps, and None if it is a fraction of an unknown number of steps. `steps` is None if it is
        unknown. `end` is the last learning rate divided by the highest.
        """
        settings = self.settings
        if warmup is None:
            self.remarks.append("set optimizer.warmup_updates: the warm-up is a fraction of an unknown number of steps")
        elif warmup:
            settings["optimizer.warmup_updates"] = max(round(warmup * settings["optimizer.mini_batches"]), 1)
        if settings.get("optimizer.schedule", "constant") == "constant":
            return
        settings["optimizer.final_rate"] = end
        if warmup and steps is not None:
            settings["optimizer.decay_from"] = round(min(float(warmup / steps), 0.999), 6)
        elif warmup:
            self.remarks.append(
                "set optimizer.decay_from to the fraction of the steps at which the learning rate falls"
            )

    def finish(self, trainer: Literal["TRL", "verl"], logger: str, without: Mapping[str, Any]) -> Conversion:
        """Return the conversion.

        `logger` is the key of the loggers. `without` lists keys that change what is trained and have no counterpart,
        each with the value that has no effect.
        """
        self._fit()
        given = {key: value for key, value in self.given.items() if value not in (None, [], {})}
        inside = tuple(f"{name}." for name in without)
        left = [
            key for key, value in given.items()
            if key not in self._read and (key in without or key.startswith(inside)) and value != without.get(key)
        ]  # fmt: skip
        loggers = (*get_args(TrackerName), *_OF_THE_CONSOLE)
        named = [f"{logger}: {name}" for name in names(self.given.get(logger) or []) if name not in loggers]
        others = {*given} - self._read - {*left, *without}
        return Conversion(trainer, self.settings, (*sorted(left), *named), tuple(sorted(others)), tuple(self.remarks))

    def _fit(self) -> None:
        """Remove a clip that only PPO has, and say what top-p and top-k mean for brorl's learner."""
        settings = self.settings
        if settings.get("sampling.top_p", 1.0) < 1 or settings.get("sampling.top_k", 0):
            self.remarks.append(
                "top_p and top_k: brorl's learner computes log-probs, ratios and penalties among the kept tokens, as "
                "rollouts are drawn; the other learner computes them over all tokens"
            )
        if settings.get("loss.kind", "ppo") != "ppo":
            settings.pop("loss.dual_clip", None)
