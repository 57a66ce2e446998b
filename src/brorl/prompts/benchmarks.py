r"""Benchmarks by name: their datasets, and the layouts of these.

Benchmarks of code, science and instruction following have the layout of their authors, which drops rows that cannot be
verified. The datasets of a mathematical benchmark have different column names; the first known name that a row has is
used. No row of these is skipped, and one that repeats is a prompt of its own: a row without question or answer is an
error of one line with its columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from brorl.errors import UserError
from brorl.paths import split_revision
from brorl.prompts.files import SourceReading, named, read_source
from brorl.prompts.layouts.text import ANSWERS, CONTEXT, QUESTIONS, SOLUTIONS, benchmark_row
from brorl.prompts.prompt import DroppedRow
from brorl.prompts.rows import read_rows
from brorl.prompts.settings import FileSource
from brorl.wording import option

_NAMES = [*QUESTIONS, *ANSWERS, *SOLUTIONS, CONTEXT]
_SPELLINGS = {spelling for name in _NAMES for spelling in (name, name.capitalize(), name.title(), name.upper())}


class HubDataset(NamedTuple):
    """A dataset of a benchmark on the Hugging Face hub: its id, the split to evaluate on, and its configuration."""

    id: str
    split: str
    subset: str | None = None


class PublicBenchmark(NamedTuple):
    """A benchmark."""

    title: str  # its name and size
    hubs: tuple[HubDataset, ...]  # its datasets; the first is the default
    layout: str | None = None  # name of the layout of its datasets; None for mathematics in columns of any usual name


# Name, title, layout, and datasets as `id split subset`.
BENCHMARKS: Mapping[str, PublicBenchmark] = {
    name: PublicBenchmark(title, tuple(HubDataset(*hub.split()) for hub in hubs), layout)
    for name, title, layout, *hubs in (
        ("aime24", "AIME 2024, 30 problems", None, "HuggingFaceH4/aime_2024 train", "math-ai/aime24 test",
         "Maxwell-Jia/AIME_2024 train"),
        ("aime25", "AIME 2025, 30 problems", None, "math-ai/aime25 test", "yentinglin/aime_2025 train"),
        ("hmmt25", "HMMT February 2025, 30 problems", None, "MathArena/hmmt_feb_2025 train"),
        ("brumo25", "BRUMO 2025, 30 problems", None, "MathArena/brumo_2025 train"),
        ("cmimc25", "CMIMC 2025, 40 problems", None, "MathArena/cmimc_2025 train"),
        ("amc", "AMC 12 of 2022 and 2023, 83 problems", None, "AI-MO/aimo-validation-amc train", "math-ai/amc23 test"),
        ("math", "MATH-500, 500 problems", None, "HuggingFaceH4/MATH-500 test", "math-ai/math500 test"),
        ("minerva", "Minerva Math, 272 problems", None, "math-ai/minervamath test"),
        ("olympiadbench", "OlympiadBench, English text-only mathematics, 674 problems", None,
         "math-ai/olympiadbench test", "Hothan/OlympiadBench train OE_TO_maths_en_COMP"),
        ("gsm8k", "GSM8K, 1,319 test problems", None, "openai/gsm8k test main"),
        ("humaneval_plus", "HumanEval+, 164 functions", "humaneval", "evalplus/humanevalplus test"),
        ("mbpp_plus", "MBPP+, 378 functions", "mbpp", "evalplus/mbppplus test"),
        ("livecodebench", "LiveCodeBench, code generation", "livecodebench",
         "livecodebench/code_generation_lite test", "livecodebench/code_generation test"),
        ("apps", "APPS in the validation set of PRIME", "prime_apps",
         "PRIME-RL/Eurus-2-RL-Data validation"),
        ("codecontests", "CodeContests in the validation set of PRIME", "prime_codecontests",
         "PRIME-RL/Eurus-2-RL-Data validation"),
        ("codeforces", "Codeforces in the validation set of PRIME", "prime_codeforces",
         "PRIME-RL/Eurus-2-RL-Data validation"),
        ("taco", "TACO in the validation set of PRIME", "prime_taco",
         "PRIME-RL/Eurus-2-RL-Data validation"),
        ("gpqa_diamond", "GPQA Diamond, 198 questions", "gpqa", "Idavidrein/gpqa train gpqa_diamond"),
        ("mmlu_pro", "MMLU-Pro, 12,032 test questions", "mmlu_pro", "TIGER-Lab/MMLU-Pro test"),
        ("ifeval", "IFEval, 541 prompts, strict", "ifeval", "google/IFEval train"),
    )
}  # fmt: skip


@dataclass(frozen=True)
class BenchmarkSource:
    """A benchmark and the path of its data.

    Raises:
        ValueError: If there is no such benchmark, or the name has a colon.
    """

    benchmark: str  # one of `BENCHMARKS`
    path: str | None = None  # file, folder, pattern or hub id; None for the default dataset
    name: str | None = None  # name in ids and tables; None for the benchmark's name
    split: str | None = None  # split of a hub dataset; None for its known split, else that of the default dataset
    subset: str | None = None  # configuration of a hub dataset; None for its known subset

    def __post_init__(self) -> None:
        if self.benchmark not in BENCHMARKS:
            raise ValueError(f"there is no benchmark {self.benchmark!r} (there are: {', '.join(BENCHMARKS)})")
        if ":" in self.label:
            raise ValueError(
                f"name: {self.name!r} must have no colon, which separates the parts of ids; choose another name"
            )

    @property
    def label(self) -> str:
        """Name in ids and tables."""
        return self.name or self.benchmark

    @property
    def hub(self) -> HubDataset:
        """Path, split and subset of the data; a local path has no split and no subset."""
        hubs = BENCHMARKS[self.benchmark].hubs
        path = self.path or hubs[0].id
        known = next((hub for hub in hubs if hub.id == split_revision(path)[0]), HubDataset(path, hubs[0].split))
        return HubDataset(path, self.split or known.split, self.subset or known.subset)


def read_benchmark(source: BenchmarkSource, seed: int = 0) -> SourceReading:
    """Read the questions of a benchmark, one per row, and the rows that a layout dropped.

    Ids are `label:row`, or `label:file:row` if there are several files.

    Raises:
        UserError: If nothing can be read, or a row has no question or no answer.
    """
    benchmark, hub = BENCHMARKS[source.benchmark], source.hub
    if benchmark.layout:
        file = FileSource(path=hub.id, name=source.label, subset=hub.subset, split=hub.split, layout=benchmark.layout)
        return read_source(file, seed)
    questions = []
    for row in read_rows(hub.id, hub.subset, hub.split, _SPELLINGS):
        try:
            questions.append(named(benchmark_row(row.values), source.label, row.key, row.location))
        except DroppedRow as reason:
            in_box = f", or {' or '.join(SOLUTIONS[:2])} with a \\boxed{{}}"
            expected = QUESTIONS if "question" in str(reason) else ANSWERS
            raise UserError(
                f"{row.location} has {reason} for {source.benchmark} (columns: {', '.join(row.columns) or 'none'}; "
                f"expected one of {', '.join(expected)}{in_box if expected is ANSWERS else ''}); name the columns: "
                f"{option('data', '{path: ..., prompt_column: ..., answer_column: ...}')}"
            ) from None
    if not questions:
        raise UserError(f"{hub.id} is empty; {source.benchmark} needs at least one row")
    return SourceReading(questions, len(questions))
