"""Lists the layouts that read public datasets, and the benchmarks with their sources.

To add a layout, write a function in its domain's file and add a line here. A row that does not fit its layout is an
error that names the row, the problem and any layout that does fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from itertools import starmap
from typing import NamedTuple

from brorl.errors import UserError, source_setting
from brorl.prompts.layouts import code, puzzles, text
from brorl.prompts.question import Question
from brorl.prompts.row import Cells, DroppedRow, Row
from brorl.prompts.settings import FileSource
from brorl.storage import split_revision


class Layout(NamedTuple):
    """How to read the rows of public datasets with the same columns."""

    name: str  # the word that selects the layout in `data.sources[].layout`
    columns: tuple[str, ...]  # columns that `read` needs
    # Maps a row's cells, and a seed that shuffles options, to a question. Raises `DroppedRow`, or a ValueError
    # that states the problem if the row does not have this layout.
    read: Callable[[Cells, int], Question]
    datasets: tuple[str, ...] = ()  # hub ids of datasets with this layout
    optional: tuple[str, ...] = ()  # columns that `read` uses if present
    only: tuple[tuple[str, str], ...] = ()  # (column, value): keep only rows with this value
    # Whether every row matters: a row without a question is an error, and a repeated row is a separate question.
    is_whole: bool = False

    def question(self, row: Cells, seed: int) -> Question:
        """Return the question of a row; see `read`. Rows that `only` excludes raise `DroppedRow`."""
        for column, value in self.only:
            if row[column] != value:
                raise DroppedRow(f"the {column} is {row[column]}, not {value}")
        return self.read(row, seed)


_CONTEST = "description, public_tests, private_tests, generated_tests, solutions, time_limit, memory_limit_bytes"
_CODEFORCES = (
    "title, description, input_format, output_format, interaction_format, note, examples, official_tests, time_limit, "
    "memory_limit, input_mode, generated_checker"
)
_EURUS, _EURUS_HUB = "prompt, reward_model, ability", "PRIME-RL/Eurus-2-RL-Data"
_LIVE = "question_content, starter_code, public_test_cases, private_test_cases, metadata"
_GPQA = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_SCIQ = ("correct_answer", "distractor1", "distractor2", "distractor3")
_VERL = text.answered("prompt", "reward_model.ground_truth")


def _layout(name: str, read: Callable[[Cells, int], Question], columns: str, datasets: str) -> Layout:
    """Return a layout. `columns` lists `name`, `name?` (optional) or `name=value` (keep only rows with the value)."""
    listed = columns.split(", ")
    needed = tuple(column.partition("=")[0] for column in listed if not column.endswith("?"))
    only = tuple((key, value) for key, _, value in (column.partition("=") for column in listed) if value)
    optional = tuple(column[:-1] for column in listed if column.endswith("?"))
    return Layout(name, needed, read, tuple(datasets.split(", ")), optional, only)


LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in starmap(_layout, (
        ("deepscaler", text.answered("problem", "answer"), "problem, answer",
         "agentica-org/DeepScaleR-Preview-Dataset"),
        ("dapo", _VERL, "prompt, reward_model", "BytedTsinghua-SIA/DAPO-Math-17k"),
        ("eurus2_math", _VERL, f"{_EURUS}=math", _EURUS_HUB),
        ("skywork_math", text.answered("prompt", "reward_model.ground_truth", text.the_only), f"{_EURUS}=math",
         "Skywork/Skywork-OR1-RL-Data"),
        ("open_math_reasoning", text.answered("problem", "expected_answer"),
         "problem, problem_type=has_answer_extracted, expected_answer", "nvidia/OpenMathReasoning"),
        ("gsm8k", text.answered("question", "answer", text.after_marker), "question, answer", "openai/gsm8k"),
        ("math", text.answered("problem", "solution", text.boxed), "problem, solution", "EleutherAI/hendrycks_math"),
        ("gpqa", text.choices("Question", _GPQA), f"Question, {', '.join(_GPQA)}", "Idavidrein/gpqa"),
        ("mmlu_pro", text.choices("question", ["options"], "answer", "answer_index", first=0),
         "question, options, answer, answer_index", "TIGER-Lab/MMLU-Pro"),
        ("arc", text.choices("question", ["choices"], "answerKey"), "question, choices, answerKey", "allenai/ai2_arc"),
        ("sciq", text.choices("question", _SCIQ), f"question, {', '.join(_SCIQ)}", "allenai/sciq"),
        ("scp_116k", text.scp, "problem, matched_solution, solution", "EricLu/SCP-116K"),
        ("scibench", text.scibench, "problem_text, answer_number, unit", "xw27/scibench"),
        ("ifeval", text.ifeval, "prompt, instruction_id_list, kwargs", "google/IFEval"),
        ("ifeval_loose", partial(text.ifeval, loose=True), "prompt, instruction_id_list, kwargs", "google/IFEval"),
        ("nemotron_ifeval", text.nemotron, "input, args", "nvidia/Llama-Nemotron-Post-Training-Dataset"),
        ("if_multi_constraints", text.multi_constraints, "messages, ground_truth",
         "allenai/IF_multi_constraints_upto5"),
        ("rlvr_ifeval", text.rlvr, "messages, ground_truth", "allenai/RLVR-IFeval"),
        ("countdown", puzzles.countdown, "nums, target, prompt?", "Jiayi-Pan/Countdown-Tasks-3to4"),
        ("apps", code.apps, "question, input_output, starter_code, solutions?", "codeparrot/apps"),
        ("taco", code.apps, "question, input_output, starter_code, time_limit, solutions?", "BAAI/TACO"),
        ("code_contests", code.code_contests, f"{_CONTEST}, input_file, output_file", "deepmind/code_contests"),
        ("codeforces", code.codeforces, _CODEFORCES, "open-r1/codeforces"),
        ("livecodebench", code.live_code_bench, _LIVE,
         "livecodebench/code_generation_lite, livecodebench/code_generation"),
        ("eurus2", code.eurus2, _EURUS, _EURUS_HUB),
        ("eurus2_code", code.eurus2, f"{_EURUS}=code", _EURUS_HUB),
        *((f"prime_{name}", code.eurus2, f"{_EURUS}=code, data_source={name}", _EURUS_HUB)
          for name in ("apps", "codecontests", "codeforces", "taco")),
        ("humaneval", code.human_eval, "prompt, canonical_solution, entry_point, test",
         "evalplus/humanevalplus, openai/openai_humaneval"),
        ("mbpp", code.mbpp_plus, "code, prompt, test_imports, test_list, test", "evalplus/mbppplus"),
        ("mbpp_original", code.mbpp, "text, code, test_list, test_setup_code?, challenge_test_list?",
         "google-research-datasets/mbpp"),
        ("mbpp_sanitized", code.mbpp, "prompt, code, test_list, test_imports?", "google-research-datasets/mbpp"),
    ))
} | {
    "benchmark": Layout("benchmark", (), text.benchmark_row, optional=tuple(text.SPELLINGS), is_whole=True),
}  # fmt: skip


def find_layout(name: str | None) -> Layout | None:
    """Return the layout with the given name; None for None."""
    if name is None or name in LAYOUTS:
        return None if name is None else LAYOUTS[name]
    near = get_close_matches(name.lower(), LAYOUTS, 1)
    advice = f"did you mean {near[0]}?" if near else f"the layouts are {', '.join(LAYOUTS)}"
    raise UserError(f"{source_setting('layout', repr(name))} is not a layout; {advice}")


def layouts_of(dataset: str) -> list[str]:
    """Return the names of a hub dataset's layouts, at any revision; empty if it is unknown."""
    return [layout.name for layout in LAYOUTS.values() if split_revision(dataset)[0] in layout.datasets]


def read_layout(row: Row, layout: Layout, seed: int) -> Question:
    """Return the question of a row, or raise `DroppedRow` if it cannot be verified. The seed shuffles options."""
    try:
        return layout.question(row.values, seed)
    except DroppedRow as reason:
        if not layout.is_whole:
            raise
        raise UserError(
            f"{row.location} has {reason} (columns: {', '.join(row.columns) or 'none'}; expected one of "
            f"{', '.join(text.QUESTIONS)}, and one of {', '.join(text.ANSWERS)} or a solution with a \\boxed{{}}); "
            f"name the columns with {source_setting('prompt_column')} and answer_column"
        ) from None
    except KeyError as error:
        raise _other_layout(row, layout, f"it has no column {str(error.args[0])!r}") from error
    except (ValueError, TypeError, AttributeError) as error:  # a value of the wrong type raises either of the last two
        raise _other_layout(row, layout, str(error)) from error


def _other_layout(row: Row, layout: Layout, problem: str) -> UserError:
    """Return the error for a row that does not fit the layout. It names the layouts whose columns the row has."""
    columns = set(row.columns)
    fitting = [
        other.name
        for other in LAYOUTS.values()
        if other.columns and other is not layout and columns.issuperset(other.columns)
    ]
    if fitting:
        advice = f"set {source_setting('layout')} to one that fits these columns: {' or '.join(fitting)}"
    elif columns.issuperset(layout.columns):
        advice = "fix or delete the row"
    else:
        advice = f"no layout fits these columns; name them with {source_setting('prompt_column')} and answer_column"
    return UserError(
        f"{row.location} is not in the layout {layout.name}: {problem} (columns: {', '.join(row.columns) or 'none'}); "
        f"{advice}"
    )


class HubDataset(NamedTuple):
    """A benchmark's dataset on the Hugging Face hub."""

    layout: str  # name of a `Layout`
    id: str
    split: str  # split to evaluate on
    subset: str | None = None  # configuration of the dataset


# Name, layout, and datasets as `id split subset`; the first dataset is the default.
BENCHMARKS: Mapping[str, tuple[HubDataset, ...]] = {
    name: tuple(HubDataset(layout, *hub.split()) for hub in hubs)
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
    """Return a benchmark's source. A known path determines the split and subset; otherwise the defaults apply."""
    if benchmark not in BENCHMARKS:
        raise ValueError(f"there is no benchmark {benchmark!r}; choose one of {', '.join(BENCHMARKS)}")
    default = BENCHMARKS[benchmark][0]
    path = path or default.id
    known = {hub.id: hub for hub in BENCHMARKS[benchmark]}.get(split_revision(path)[0])
    hub = known or default._replace(subset=None)
    return FileSource(
        path=path, name=name or benchmark, layout=hub.layout, split=split or hub.split, subset=subset or hub.subset
    )
