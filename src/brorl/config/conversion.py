"""What the conversions of TRL's and verl's configs share: their result, and how single values are read.

A key of a config is one of four things: converted by a table, handled with others, without effect on what is trained
here, or named as left out. Every other key is named too, unless its value is the other trainer's own default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from brorl.errors import UserError
from brorl.prompts.layouts.table import layouts_of
from brorl.trackers import TrackerName

Counterpart = tuple[str, Callable[[Any], Any]]  # the name in a recipe, and the value there

BFLOAT16 = {"dtype": "bfloat16", "importance.correction": "truncate", "optimizer.old_logprobs": "recompute"}
"""Settings of a learner that computes in bfloat16; the correction is for the difference to the engine."""
LOGGERS_OF_THE_CONSOLE = ("console", "none", "file")
"""Names of loggers that stand for what every run prints and stores."""
LARGEST_CLIP_OF_RESPONSES = 0.1
"""A wider clip has no effect on the ratio of a whole response, and is refused by `config.settings`."""


@dataclass(frozen=True)
class Conversion:
    """The settings of a recipe that do what a config of another trainer did."""

    trainer: Literal["TRL", "verl"]
    settings: Mapping[str, Any]  # by dotted name
    without_counterpart: tuple[str, ...]  # keys of the config that have none, sorted
    remarks: tuple[str, ...]  # sentences on what was chosen, and on what has to be done by hand


def same(value: Any) -> Any:
    """Return a value as it is."""
    return value


def number(value: Any) -> float:
    """Return a number; YAML reads 1e-6 as text."""
    return float(value)


def all_tokens(value: Any) -> int:
    """Return top-k with 0 for all tokens, which others write as 0, -1 or null."""
    return max(int(value or 0), 0)


def one_of(table: Mapping[Any, Any], name: str) -> Callable[[Any], Any]:
    """Return what reads a value that has to be in a table."""

    def look_up(value: Any) -> Any:
        if value not in table:
            raise UserError(
                f"{name}: {value!r} has no counterpart; the values that have one: {', '.join(map(str, table))}"
            )
        return table[value]

    return look_up


def names(value: Any) -> list[str]:
    """Return a list of names, of which a single one may be written alone."""
    return [value] if isinstance(value, str) else list(value)


def trackers(value: Any) -> list[str]:
    """Return the trackers among the loggers of a config."""
    return [name for name in names(value) if name in get_args(TrackerName)]


def other_loggers(given: Mapping[str, Any], key: str) -> list[str]:
    """Return the loggers of a config that brorl does not have, as `key: name`."""
    known = (*get_args(TrackerName), *LOGGERS_OF_THE_CONSOLE)
    return [f"{key}: {name}" for name in names(given.get(key) or []) if name not in known]


def translated(given: Mapping[str, Any], table: Mapping[str, Counterpart]) -> dict[str, Any]:
    """Return the settings of the keys that a table converts one by one."""
    return {name: read(given[key]) for key, (name, read) in table.items() if given.get(key) is not None}


def left_out(
    given: Mapping[str, Any],
    known: Iterable[str],
    irrelevant: tuple[str, ...],
    neutral: Mapping[str, Any],
) -> list[str]:
    """Return the keys that have no counterpart, sorted.

    Args:
        given: The config by dotted name.
        known: Keys that are converted.
        irrelevant: Keys without an effect on what is trained here; one that ends with `*` stands for its beginning.
        neutral: The other trainer's defaults of keys without a counterpart; with these they are not named.
    """
    begin = tuple(name[:-1] for name in irrelevant if name.endswith("*"))
    known = {*known, *irrelevant}
    return sorted(
        key for key, value in given.items()
        if key not in known and not key.startswith(begin) and value is not None and neutral.get(key) != value
        and value not in ([], {})
    )  # fmt: skip


def nested(given: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the entries of a mapping in a config, without its name."""
    return {key.removeprefix(f"{prefix}."): value for key, value in given.items() if key.startswith(f"{prefix}.")}


def adapters(rank: Any, alpha: Any, modules: Any = None) -> dict[str, Any]:
    """Return the settings of adapters."""
    targets = {} if not modules else {"lora.target_modules": names(modules)}
    return {"lora.rank": int(rank), "lora.alpha": float(alpha)} | targets


def file_source(path: str, subset: Any = None, split: Any = None, **columns: Any) -> dict[str, Any]:
    """Return a source of questions; the layout of a public dataset replaces its columns."""
    source = {"path": path} | ({"subset": subset} if subset else {}) | ({"split": split} if split else {})
    layouts = layouts_of(path)
    return source | ({"layout": layouts[0]} if len(layouts) == 1 else {k: v for k, v in columns.items() if v})


def distinct_names(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return sources with a number as the name of each whose path ends as that of an earlier one."""
    stems = [Path(str(source["path"])).stem for source in sources]
    return [
        source if stems.index(stem) == place else {**source, "name": f"{stem}-{place + 1}"}
        for place, (stem, source) in enumerate(zip(stems, sources, strict=True))
    ]


def engine_with_rounded_weights(settings: dict[str, Any], remarks: list[str]) -> None:
    """Sample with the learner's model where vLLM and weights of 4 bits are wanted together, which brorl refuses."""
    if settings.get("engine.kind") == "vllm" and settings.get("lora.quantization") == "nf4":
        for name in [name for name in settings if name == "engine.kind" or name.startswith("engine.vllm.")]:
            del settings[name]
        settings["engine.kind"] = "native"
        remarks.append(
            "vLLM samples with whole weights, and the learner's have 4 bits: the recipe has engine.kind: native; to "
            "sample with vLLM, remove lora.quantization and set engine.kind: vllm"
        )


def policy_of_kept_tokens(settings: Mapping[str, Any], remarks: list[str]) -> None:
    """Say what top-p and top-k mean for the learner, which the other trainers let see all tokens."""
    if settings.get("sampling.top_p", 1.0) < 1 or settings.get("sampling.top_k", 0):
        remarks.append(
            "top_p and top_k: the log-probs, ratios and penalties of brorl's learner are those among the kept tokens, "
            "as the rollouts are drawn; the other learner's are over all tokens"
        )


def narrow_clips(settings: dict[str, Any], remarks: list[str]) -> None:
    """Use brorl's bounds of the ratio of whole responses where those of the config have no effect."""
    given = [settings.pop(name) for name in ("loss.clip_low", "loss.clip_high") if name in settings]
    if given and max(given) <= LARGEST_CLIP_OF_RESPONSES:
        settings |= {"loss.clip_low": given[0], "loss.clip_high": given[-1]}
    elif given:
        remarks.append(
            f"clips at {max(given):g} have no effect on the ratio of a whole response; the recipe has those of GSPO, "
            "3e-4 and 4e-4"
        )
