"""One page of Markdown from the results: the machine, every table, the kernels that take the longest, the aims."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from harness import ABSENT, Record, table

Facts = dict[str, Any]
_AIMED_ROWS = 2048
_EXACT = re.compile(r"exactness: (?P<kind>[^,]+)(?:, (?P<what>\w+)(?: (?P<precision>\w+))?)?")


class Aim(NamedTuple):
    """A row of the table of aims."""

    name: str
    before: str  # on one H200, at commit fee6d205
    floor: str
    aim: str
    measured: Callable[[dict[str, Facts]], str]  # from the facts of all parts; "" if it was not measured


def page(record: Record) -> str:
    """Return the page."""
    facts = {name: entry["facts"] for name, entry in record.parts.items() if entry.get("facts")}
    machine = [(name, value) for name, value in record.options.items() if value not in ("", None)]
    blocks = [
        "# brorl on a GPU",
        table(("what", "value"), machine),
        *_ceilings(facts),
        _section("Aims", "", table(("", "before", "floor", "aim", "measured"), _aims(facts))),
        _section("A training step of a real model", "", _steps(facts)),
        _section("Decoding", "Seconds of sampling over the positions of a response.", _decoding(facts)),
        _section("Learning", "A step: old log-probs, gradient and update.", _learning(facts)),
        _section("Kernels that take the longest", "", _top(facts)),
        _section("What the engine and the learner said", "", "\n".join(_said(facts))),
        _section("Exactness", "", _exactness(record)),
        _section("Not measured", "", "\n".join(_not_measured(record))),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _section(title: str, text: str, body: str) -> str:
    return "\n\n".join(block for block in (f"## {title}", text, body) if block) if body else ""


def _ceilings(facts: dict[str, Facts]) -> Iterator[str]:
    if found := facts.get("ceilings"):
        bandwidth, matmul = found["copy_bytes_per_s"] / 1e12, found["matmul_flops_per_s"] / 1e12
        yield f"A large copy moves {bandwidth:.3g} TB/s, a large bfloat16 product computes {matmul:.4g} TFLOP/s."


def _parts(facts: dict[str, Facts], kind: str) -> Iterator[tuple[str, str, Facts]]:
    """Yield the work, the way and the facts of each part of a kind, whose name is `kind: work by way`."""
    for name, found in facts.items():
        if name.startswith(f"{kind}: "):
            work, _, way = name.removeprefix(f"{kind}: ").rpartition(" by ")
            yield work, way, found


def _steps(facts: dict[str, Facts]) -> str:
    seconds = {(work, way): found["step_s"] for work, way, found in _parts(facts, "step")}
    rows = []
    for work, way, found in _parts(facts, "step"):
        ours = seconds.get((work, "brorl"))
        parts = ", ".join(f"{name} {value:.2f}" for name, value in found["parts"].items() if value >= 0.005)
        ratio = None if way == "brorl" or not ours else found["step_s"] / ours
        rows.append(
            (
                work, way, len(found["seconds"]), f"{found['step_s']:.3g}", _number(ratio, ".2f"), parts,
                _number(found["rounds"], ".1f"), _number(found["unique_fraction"], ".1%"),
                _number(found["mean_reward"], ".3f"), _memory(found),
            )
        )  # fmt: skip
    return table(
        ("N x prompts", "by", "steps", "seconds", "over brorl's", "parts, s", "rounds", "computed", "reward",
         "peak / predicted, GiB"),
        rows,
    )  # fmt: skip


def _decoding(facts: dict[str, Facts]) -> str:
    rows = [
        (
            work, way, f"{found['ms_per_position']:.3g}", f"{found['tokens_per_s']:,.0f}", f"{found['first_s']:.3g}",
            len(found["seconds"]), f"{found['unique_fraction']:.1%}", f"{found['bandwidth_fraction']:.1%}",
            f"{found['matmul_fraction']:.1%}", *(_number(found.get(f"{what}_per_position"), ".1f") for what in
            ("kernels", "launches", "waits")), _memory(found),
        )
        for work, way, found in _parts(facts, "decoding")
    ]  # fmt: skip
    return table(
        ("model, N x prompts", "by", "ms a position", "tokens/s", "first call, s", "calls", "computed", "bandwidth",
         "matrix peak", "kernels a position", "launches", "waits", "peak / predicted, GiB"),
        rows,
    )  # fmt: skip


def _learning(facts: dict[str, Facts]) -> str:
    flat = {work: found["step_s"] for work, way, found in _parts(facts, "learning") if way == "flat"}
    rows = [
        (
            work, way, f"{found['nodes']:,}", f"{found['nodes_per_s']:,.0f}", f"{found['tokens_per_s']:,.0f}",
            f"{found['step_s']:.3g}", f"{found['first_s']:.3g}", len(found["seconds"]),
            f"{found['matmul_fraction']:.1%}", _number(flat[work] / found["step_s"] if work in flat else None, ".2f"),
            _memory(found),
        )
        for work, way, found in _parts(facts, "learning")
    ]  # fmt: skip
    return table(
        ("model, responses", "by", "nodes", "nodes/s", "sampled tokens/s", "step, s", "first step, s", "steps",
         "matrix peak", "flat's seconds over", "peak / predicted, GiB"),
        rows,
    )  # fmt: skip


def _top(facts: dict[str, Facts]) -> str:
    blocks = []
    for name, found in facts.items():
        if found.get("top"):
            rows = [(f"`{kernel}`", starts, f"{1e3 * seconds:.3g}") for kernel, starts, seconds in found["top"]]
            blocks.append(f"{name}\n\n" + table(("kernel", "starts", "ms"), rows))
    return "\n\n".join(blocks)


def _said(facts: dict[str, Facts]) -> Iterator[str]:
    for name, found in facts.items():
        yield from (f"- {name}: {line.strip()}" for line in found.get("said", ()))


def _exactness(record: Record) -> str:
    """Return for each precision the parts, the checks within their bounds, and the largest errors."""
    found: dict[str, list[dict[str, Any]]] = {}
    parts: dict[str, int] = {}
    for name, entry in record.parts.items():
        if match := _EXACT.match(name):
            precision = match["precision"] or match["what"] or match["kind"]
            parts[precision] = parts.get(precision, 0) + 1
            found.setdefault(precision, []).extend(entry.get("checks", ()))
    rows = []
    for precision, checks in found.items():
        largest = (
            max((check["value"] for check in checks if re.search(rf"{what}\b", check["name"])), default=math.nan)
            for what in ("log-prob(, RMS)?", "gradient")
        )
        passed = sum(check["passed"] for check in checks)
        errors = (ABSENT if math.isnan(value) else f"{value:.1e}" for value in largest)
        rows.append((precision, parts[precision], f"{passed} of {len(checks)}", *errors))
    return table(("precision", "parts", "within their bounds", "log-prob, nats", "gradient, relative"), rows)


def _not_measured(record: Record) -> Iterator[str]:
    for name, entry in record.parts.items():
        if entry["state"] == "skipped":
            yield f"- {name}: {entry['reason']}"
        elif entry["state"] == "failed":
            yield f"- {name} failed: `{entry['traceback'].strip().splitlines()[-1][:300]}`"
    yield from (f"- {line}" for line in record.failed_checks())


def _aims(facts: dict[str, Facts]) -> list[tuple[str, ...]]:
    aims = (
        Aim("TRL's step over ours, N = 128 x 16, 64 tokens", ".43 to .95", "2", "4", _ratio),
        Aim("a decoding position, 30 layers, up to 2,048 rows, ms", "28 to 41", "8", "4", _positions),
        Aim("sampling, 300M, N = 512: share of the bandwidth", "9.6%", "30%", "50%", _bandwidth),
        Aim("learning, 300M / 1.5B: share of the matrix peak", "11% / -", "30 / 40%", "40 / 50%", _matmul),
        Aim("rounds a step once the rate is known", "2 to 3", "1.2", "1.1", _rounds),
    )
    return [(*aim[:4], aim.measured(facts)) for aim in aims]


def _of_step(facts: dict[str, Facts], way: str) -> Facts | None:
    return next(
        (f for work, by, f in _parts(facts, "step") if by == way and work.startswith("128 x 16, 64 tokens")), None
    )


def _ratio(facts: dict[str, Facts]) -> str:
    ours, trl = (_of_step(facts, way) for way in ("brorl", "TRL"))
    return f"{trl['step_s'] / ours['step_s']:.2f}" if ours and trl else ""


def _rounds(facts: dict[str, Facts]) -> str:
    ours = _of_step(facts, "brorl")
    return f"{ours['rounds']:.1f}" if ours else ""


def _is_ours(way: str) -> bool:
    return way not in ("generate", "vLLM")


def _positions(facts: dict[str, Facts]) -> str:
    """Return the range over the rows of the milliseconds of our fastest way."""
    best: dict[str, float] = {}
    for work, way, found in _parts(facts, "decoding"):
        rows = found["setting"]["num_rollouts"] * found["setting"]["num_prompts"]
        if _is_ours(way) and rows <= _AIMED_ROWS and re.match("SmolLM2|135M", work):
            best[work] = min(found["ms_per_position"], best.get(work, math.inf))
    return f"{min(best.values()):.3g} to {max(best.values()):.3g}" if best else ""


def _bandwidth(facts: dict[str, Facts]) -> str:
    found = [
        f["bandwidth_fraction"]
        for work, way, f in _parts(facts, "decoding")
        if _is_ours(way) and work.startswith("300M 512 x 1,")
    ]
    return f"{max(found):.1%}" if found else ""


def _matmul(facts: dict[str, Facts]) -> str:
    best = [
        max((f["matmul_fraction"] for work, way, f in _parts(facts, "learning") if work.startswith(size)), default=None)
        for size in ("300M ", "1.5B ")
    ]
    return " / ".join(_number(value, ".1%") for value in best) if any(best) else ""


def _memory(found: Facts) -> str:
    sizes = [found.get(key) for key in ("peak_bytes", "predicted_bytes")]
    texts = [ABSENT if size is None else f"{size / 2**30:.2f}" for size in sizes]
    return ABSENT if texts == [ABSENT, ABSENT] else " / ".join(texts)


def _number(value: float | None, form: str) -> str:
    return ABSENT if value is None else f"{value:{form}}"
