"""The ways to train that a run can choose for its memory: what each needs, and the smallest change that fits.

A change is smaller if it changes less of what is learned. Of two changes that are equal in this, the faster is smaller.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import ceil
from operator import attrgetter
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from brorl.model.memory_prediction import MemoryPrediction, MemorySettings, ModelMemory, Workload, size_text
from brorl.model.settings import LoraSettings, States
from brorl.table import Table

_RANK = 16  # rank of the adapters, for a run that has none
_GIB = 1 << 30
_at_most = attrgetter("total_bytes")


class Choice(NamedTuple):
    """A way to train."""

    name: str  # the settings of this way, also those that the run has
    changes: dict[str, Any]  # the settings that differ from the run's, by dotted name
    settings: MemorySettings
    prediction: MemoryPrediction


class MemoryChoices:
    """The ways to train one model on one device, whose free memory is `available` bytes."""

    def __init__(self, config: PreTrainedConfig, settings: MemorySettings, workload: Workload, available: int) -> None:
        self._model = ModelMemory(config, settings.forward)
        self._settings, self._workload, self._available = settings, workload, available

    def all(self) -> list[Choice]:
        """Return all ways to train. Ways that change less of what is learned come first."""
        return [self._choice(*way) for way in _ways(self._settings)]

    def smallest_change(self) -> Choice | None:
        """Return the smallest change with which a run fits even if responses reach the length limit.

        If no change does, return the smallest change with which the run starts, or None.
        """
        own = Choice("", {}, self._settings, self._predict(self._settings))
        ways = [own, *(choice for choice in self.all() if choice.changes)]
        for needed in (_at_most, attrgetter("certain_bytes")):
            for choice in ways:
                if found := self.fitted(choice, needed):
                    return found
        return None

    def fitted(self, choice: Choice, needed: Callable[[MemoryPrediction], int] | None = None) -> Choice | None:
        """Return a way to train with the smallest further changes that make it fit, or None if it never fits.

        The changes are in `engine.memory_gib`, `reference.offload`, `engine.gradient_checkpointing` and
        `engine.cuda_graphs`, which do not change what is learned. `needed` returns the bytes that have to fit, by
        default at the peak.
        """
        for changes, settings in _exact_changes(choice.settings):
            changed = choice._replace(changes=choice.changes | changes, settings=settings)
            if found := self._with_less_for_the_engine(changed, needed or _at_most):
                return found
        return None

    def fix(self) -> str:
        """Return the smallest change as the end of the message that the run does not fit."""
        found = self.smallest_change()
        if found is None:
            return (
                "; no change of optimizer.states, lora or engine makes it fit: choose a smaller model, a device with "
                "more memory, or several (cluster.learner_ranks)"
            )
        if not found.changes:
            return ""
        fits = found.prediction.total_bytes <= self._available
        size = size_text(found.prediction.total_bytes if fits else found.prediction.certain_bytes)
        return (
            f"; the smallest change {'that fits' if fits else 'with which it starts'}: {_text(found.changes)} ({size})"
        )

    def table(self) -> Table:
        """Return what each way to train needs."""
        rows, own = [], set()
        for index, choice in enumerate(self.all()):
            found = self.fitted(choice)
            further = {} if found is None else {k: v for k, v in found.changes.items() if k not in choice.changes}
            fits = "no" if found is None else f"with {_text(further)}" if further else "yes"
            own |= set() if choice.changes else {index}
            sizes = size_text(choice.prediction.kept_bytes), size_text(choice.prediction.total_bytes)
            rows.append((choice.name if choice.changes else f"{choice.name} (this run)", *sizes, fits))
        title = f"What a run needs by how it trains; {size_text(self._available)} are available"
        columns = ("settings", "kept", "peak", "fits")
        return Table(title, columns, tuple(rows), words=frozenset({0, 3}), strong=frozenset(own))

    def _predict(self, settings: MemorySettings) -> MemoryPrediction:
        return self._model.predict(settings, self._workload, self._available)

    def _choice(self, states: States, lora: LoraSettings | None) -> Choice:
        settings = replace(self._settings, states=states, lora=lora)
        own, here = _made_by(self._settings), _made_by(settings)
        changes = {name: value for name, value in here.items() if value != own[name]}
        shown = here if lora is None else {name: here[name] for name in ("lora.rank", "lora.quantization")}
        hidden = {"lora.rank": 0, "lora.quantization": "none"}
        name = _text({name: value for name, value in shown.items() if hidden.get(name) != value})
        return Choice(name, changes, settings, self._predict(settings))

    def _with_less_for_the_engine(self, choice: Choice, needed: Callable[[MemoryPrediction], int]) -> Choice | None:
        """Return a choice with the largest `engine.memory_gib` that fits, at most the run's."""

        def with_gib(gib: int) -> Choice:
            settings = replace(choice.settings, engine_bytes=gib * _GIB)
            changes = choice.changes | {"engine.memory_gib": gib}
            return choice._replace(changes=changes, settings=settings, prediction=self._predict(settings))

        def fits(one: Choice) -> bool:
            return needed(one.prediction) <= self._available

        own = choice._replace(prediction=self._predict(choice.settings))
        if fits(own):
            return own
        least = max(1, ceil(2 * own.prediction.row_bytes / _GIB))  # a row, and the prompts beside it
        most = ceil(choice.settings.engine_bytes / _GIB) - 1
        if most < least or not fits(with_gib(least)):
            return None
        too_much = bisect(range(least + 1, most + 1), False, key=lambda gib: not fits(with_gib(gib)))
        return with_gib(least + too_much)


def _made_by(settings: MemorySettings) -> dict[str, Any]:
    """Return the settings that make a way to train, by dotted name."""
    lora = settings.lora or LoraSettings()
    return {"optimizer.states": settings.states, "lora.rank": lora.rank, "lora.quantization": lora.quantization}


def _text(changes: dict[str, Any]) -> str:
    """Return settings as they are written in a recipe."""
    return ", ".join(f"{name}: {str(value).lower()}" for name, value in changes.items())


def _ways(settings: MemorySettings) -> Iterator[tuple[States, LoraSettings | None]]:
    """Yield the moments and the adapters of each way to train that the run's other settings allow."""
    yield "device", None
    if settings.device != "cpu":
        yield "host", None
    if settings.dtype != "float64":
        yield "8bit", None
    lora = settings.lora or LoraSettings(rank=_RANK)
    yield settings.states, lora.model_copy(update={"quantization": "none"})
    if settings.dtype != "float64" and not settings.separate_engine:
        yield settings.states, lora.model_copy(update={"quantization": "nf4"})


def _exact_changes(settings: MemorySettings) -> Iterator[tuple[dict[str, Any], MemorySettings]]:
    """Yield the changes of settings that leave what is learned as it is, faster ones first."""
    graphs = (True, False) if settings.keeps_cache else (False,)
    recomputed = (True,) if settings.gradient_checkpointing else (False, True)
    reference = (True, False) if settings.reference and settings.device != "cpu" else (settings.reference,)
    for keeps_cache, recomputes, has_reference in product(graphs, recomputed, reference):
        changed = replace(settings, keeps_cache=keeps_cache, gradient_checkpointing=recomputes, reference=has_reference)
        changes: dict[str, Any] = {}
        if has_reference != settings.reference:
            changes["reference.offload"] = True
        if recomputes != settings.gradient_checkpointing:
            changes["engine.gradient_checkpointing"] = True
        if keeps_cache != settings.keeps_cache:
            changes["engine.cuda_graphs"] = "off"
        yield changes, changed
