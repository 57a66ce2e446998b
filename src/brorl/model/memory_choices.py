"""Ways to train that differ in memory: what each needs, and the smallest change that makes a run fit.

A change is smaller if it affects less of what is learned. Between two changes with equal effect, the faster one counts
as smaller.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from operator import attrgetter
from typing import Any

from transformers import PreTrainedConfig

from brorl.model.cuda_graphs import GraphChoice
from brorl.model.memory_prediction import MemoryPrediction, ModelMemory, size_text
from brorl.model.memory_settings import MemorySettings, Workload
from brorl.model.settings import LoraSettings
from brorl.table import Table

_RANK = 16  # rank of the adapters, if the run has none
_MANY_ROWS = 32  # with fewer rows, decoding mostly waits for the weights, and gradient checkpointing costs less time
_FEW_ROWS = 2  # a row, plus the prompts
_GIB = 1 << 30
_at_most = attrgetter("total_bytes")


@dataclass(frozen=True)
class Choice:
    """A way to train."""

    settings: MemorySettings
    changes: dict[str, Any]  # settings that differ from the run's, by dotted name
    prediction: MemoryPrediction

    @property
    def name(self) -> str:
        """The settings of this way to train, including the run's."""
        recipe = _recipe(self.settings)
        if self.settings.lora is None:
            return _text({"optimizer.states": recipe["optimizer.states"]})
        quantized = self.settings.lora.quantization != "none"
        return _text({name: recipe[name] for name in ("lora.rank", "lora.quantization")[: 1 + quantized]})


class MemoryChoices:
    """The ways to train one model on a device with `available` bytes of free memory."""

    def __init__(self, config: PreTrainedConfig, settings: MemorySettings, workload: Workload, available: int) -> None:
        self._model = ModelMemory.of(config, settings.forward)
        self._own = settings
        self._workload = workload
        self._available = available

    def all(self) -> list[Choice]:
        """Return all ways to train that the run's other settings allow.

        Ways that change less of what is learned come first.
        """
        own = self._own
        rounds = self._own.dtype != "float64"
        lora = own.lora or LoraSettings(rank=_RANK)
        ways = [replace(own, states="device", lora=None)]
        if own.device != "cpu":
            ways.append(replace(own, states="host", lora=None))
        if rounds:
            ways.append(replace(own, states="8bit", lora=None))
        ways.append(replace(own, lora=lora.model_copy(update={"quantization": "none"})))
        if rounds and not own.separate_engine:
            ways.append(replace(own, lora=lora.model_copy(update={"quantization": "nf4"})))
        return [self._choice(way) for way in ways]

    def smallest_change(self) -> Choice | None:
        """Return the smallest change that makes a run fit even if responses reach the length limit.

        If there is none, return the smallest change that lets the run start, or None.
        """
        ways = [self._choice(self._own), *(choice for choice in self.all() if choice.changes)]
        fitted_ways = (self.fitted(way, needed) for needed in (_at_most, attrgetter("certain_bytes")) for way in ways)
        return next((choice for choice in fitted_ways if choice), None)

    def fitted(self, choice: Choice, needed: Callable[[MemoryPrediction], int] = _at_most) -> Choice | None:
        """Return a way to train with the smallest further changes that make it fit, or None if it never fits.

        The changes are in `engine.memory_gib`, `engine.nodes_per_pass`, `reference.offload`,
        `engine.gradient_checkpointing` and `engine.cuda_graphs`, which do not change what is learned. `needed` returns
        the bytes that must fit.
        """
        choices = (
            self._with_less_for_the_engine(settings, needed, rows)
            for rows in (_MANY_ROWS, _FEW_ROWS)
            for settings in _exact_changes(choice.settings)
        )
        return next((fitting for fitting in choices if fitting), None)

    def fix(self) -> str:
        """Return the smallest change, worded as the end of the error message for a run that does not fit."""
        change = self.smallest_change()
        if change is None:
            return (
                "; no change of optimizer.states, lora or engine makes it fit: choose a smaller model, a device with "
                "more memory, or several (cluster.learner_ranks)"
            )
        if not change.changes:
            return (
                "; no change of optimizer.states, lora or engine makes it fit: lower sampling.max_new_tokens, or "
                "choose a smaller model, a device with more memory, or several (cluster.learner_ranks)"
            )
        fits = change.prediction.total_bytes <= self._available
        size = size_text(change.prediction.total_bytes if fits else change.prediction.certain_bytes)
        return (
            f"; the smallest change {'that fits' if fits else 'with which it starts'}: {_text(change.changes)} ({size})"
        )

    def table(self) -> Table:
        """Return a table of the memory that each way to train needs."""
        rows = []
        own = set()
        for index, choice in enumerate(self.all()):
            fitted = self.fitted(choice)
            further = {} if fitted is None else {k: v for k, v in fitted.changes.items() if k not in choice.changes}
            fits = "no" if fitted is None else f"with {_text(further)}" if further else "yes"
            own |= set() if choice.changes else {index}
            sizes = size_text(choice.prediction.kept_bytes), size_text(choice.prediction.total_bytes)
            rows.append((choice.name if choice.changes else f"{choice.name} (this run)", *sizes, fits))
        title = f"What a run needs by how it trains; {size_text(self._available)} are available"
        columns = ("settings", "kept", "peak", "fits")
        return Table(title, columns, tuple(rows), words=frozenset({0, 3}), strong=frozenset(own))

    def _choice(self, settings: MemorySettings) -> Choice:
        own = _recipe(self._own)
        changes = {name: value for name, value in _recipe(settings).items() if value != own[name]}
        return Choice(settings, changes, self._model.predict(settings, self._workload, self._available))

    def _with_less_for_the_engine(
        self, settings: MemorySettings, needed: Callable[[MemoryPrediction], int], num_rows: int
    ) -> Choice | None:
        """Return a choice with the largest `engine.memory_gib` that fits: the run's, or less with `num_rows` rows."""

        def with_gib(gib: int) -> Choice:
            return self._choice(replace(settings, engine_bytes=gib * _GIB))

        def fits(choice: Choice) -> bool:
            return needed(choice.prediction) <= self._available

        own = self._choice(settings)
        if fits(own):
            return own
        least = max(1, ceil(num_rows * own.prediction.row_bytes / _GIB))
        most = ceil(settings.engine_bytes / _GIB) - 1
        if most < least or not fits(with_gib(least)):
            return None
        too_much = bisect(range(least + 1, most + 1), False, key=lambda gib: not fits(with_gib(gib)))
        return with_gib(least + too_much)


def _recipe(settings: MemorySettings) -> dict[str, Any]:
    """Return all settings that a choice can change, as in a recipe, by dotted name."""
    lora = settings.lora or LoraSettings()
    gib = settings.engine_bytes / _GIB
    return {
        "optimizer.states": settings.states,
        "lora.rank": lora.rank,
        "lora.quantization": lora.quantization,
        "reference.offload": not settings.reference,
        "engine.nodes_per_pass": settings.nodes_per_pass,
        "engine.gradient_checkpointing": settings.gradient_checkpointing,
        "engine.cuda_graphs": settings.graphs,
        "engine.memory_gib": int(gib) if gib.is_integer() else gib,
    }


def _text(changes: dict[str, Any]) -> str:
    """Format settings as in a recipe."""
    return ", ".join(f"{name}: {'null' if value is None else str(value).lower()}" for name, value in changes.items())


def _exact_changes(settings: MemorySettings) -> Iterator[MemorySettings]:
    """Yield settings with changes that do not affect what is learned, faster ones first.

    A number of nodes per pass that is not set is halved until it fits, like the learner's.
    """
    graphs: tuple[GraphChoice, ...] = (settings.graphs, "off") if settings.keeps_cache else (settings.graphs,)
    recomputed = (True,) if settings.gradient_checkpointing else (False, True)
    reference = (True, False) if settings.reference and settings.device != "cpu" else (settings.reference,)
    sizes = (settings.nodes_per_pass,) if settings.nodes_per_pass is None else (settings.nodes_per_pass, None)
    for choice, recomputes, has_reference, nodes in product(graphs, recomputed, reference, sizes):
        yield replace(
            settings,
            graphs=choice,
            gradient_checkpointing=recomputes,
            reference=has_reference,
            nodes_per_pass=nodes,
        )
