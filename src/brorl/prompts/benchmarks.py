"""Benchmarks by name: the sources of their data. Those of mathematics have the layout of any usual columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from brorl.paths import split_revision
from brorl.prompts.settings import FileSource


class HubDataset(NamedTuple):
    """A dataset of a benchmark on the Hugging Face hub: its id, the split to evaluate on, and its configuration."""

    id: str
    split: str
    subset: str | None = None


class PublicBenchmark(NamedTuple):
    """A benchmark."""

    layout: str  # name of the layout of its datasets
    hubs: tuple[HubDataset, ...]  # its datasets; the first is the default


# Name, layout, and datasets as `id split subset`.
BENCHMARKS: Mapping[str, PublicBenchmark] = {
    name: PublicBenchmark(layout, tuple(HubDataset(*hub.split()) for hub in hubs))
    for name, layout, *hubs in (
        ("aime24", "benchmark", "HuggingFaceH4/aime_2024 train", "math-ai/aime24 test", "Maxwell-Jia/AIME_2024 train"),
        ("aime25", "benchmark", "math-ai/aime25 test", "yentinglin/aime_2025 train"),
        ("hmmt25", "benchmark", "MathArena/hmmt_feb_2025 train"),
        ("brumo25", "benchmark", "MathArena/brumo_2025 train"),
        ("cmimc25", "benchmark", "MathArena/cmimc_2025 train"),
        ("amc", "benchmark", "AI-MO/aimo-validation-amc train", "math-ai/amc23 test"),
        ("math", "benchmark", "HuggingFaceH4/MATH-500 test", "math-ai/math500 test"),
        ("minerva", "benchmark", "math-ai/minervamath test"),
        ("olympiadbench", "benchmark", "math-ai/olympiadbench test",
         "Hothan/OlympiadBench train OE_TO_maths_en_COMP"),
        ("gsm8k", "benchmark", "openai/gsm8k test main"),
        ("humaneval_plus", "humaneval", "evalplus/humanevalplus test"),
        ("mbpp_plus", "mbpp", "evalplus/mbppplus test"),
        ("livecodebench", "livecodebench", "livecodebench/code_generation_lite test",
         "livecodebench/code_generation test"),
        *((name, f"prime_{name}", "PRIME-RL/Eurus-2-RL-Data validation")
          for name in ("apps", "codecontests", "codeforces", "taco")),
        ("gpqa_diamond", "gpqa", "Idavidrein/gpqa train gpqa_diamond"),
        ("mmlu_pro", "mmlu_pro", "TIGER-Lab/MMLU-Pro test"),
        ("ifeval", "ifeval", "google/IFEval train"),
    )
}  # fmt: skip


def benchmark_source(
    benchmark: str,
    path: str | None = None,
    name: str | None = None,
    split: str | None = None,
    subset: str | None = None,
) -> FileSource:
    """Return the source of a benchmark; split and subset are those known of the path, else those of the default one."""
    if benchmark not in BENCHMARKS:
        raise ValueError(f"there is no benchmark {benchmark!r} (there are: {', '.join(BENCHMARKS)})")
    layout, hubs = BENCHMARKS[benchmark]
    path = path or hubs[0].id
    known = next((hub for hub in hubs if hub.id == split_revision(path)[0]), HubDataset(path, hubs[0].split))
    return FileSource(
        path=path, name=name or benchmark, layout=layout, split=split or known.split, subset=subset or known.subset
    )
