"""The layouts of public datasets by name, and the reading of their rows.

A new layout is a function in the file of its domain and a line here. A row of another layout is an error of one line
with the row, the problem and the layout that fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from difflib import get_close_matches

from brorl.errors import UserError
from brorl.paths import split_revision
from brorl.prompts.layouts import code, instructions, math, science
from brorl.prompts.layouts.layout import DroppedRow, Fields, Layout
from brorl.prompts.row_files import Row

_GPQA = "Question, Correct Answer, Incorrect Answer 1, Incorrect Answer 2, Incorrect Answer 3"
_CONTEST = "description, public_tests, private_tests, generated_tests, solutions, time_limit, memory_limit_bytes, "
_CODEFORCES = (
    "title, description, input_format, output_format, interaction_format, note, examples, official_tests, time_limit, "
    "memory_limit, input_mode, generated_checker"
)
_PRIME = "data_source, prompt, ability, reward_model"
_LIVE = "question_content, starter_code, public_test_cases, private_test_cases, metadata"

LAYOUTS: Mapping[str, Layout] = {
    name: Layout(
        name,
        tuple(column for column in columns.split(", ") if not column.endswith("?")),
        read,
        tuple(data_sets.split(", ")),
        summary,
        tuple(column[:-1] for column in columns.split(", ") if column.endswith("?")),
    )
    for name, read, columns, data_sets, summary in (
        ("deepscaler", math.problem_and_answer, "problem, answer", "agentica-org/DeepScaleR-Preview-Dataset",
         "competition problems with a short answer"),
        ("dapo", math.dapo, "prompt, reward_model", "BytedTsinghua-SIA/DAPO-Math-17k",
         "competition problems with whole numbers as answers; every row is repeated about a hundred times, and counts "
         "once"),
        ("eurus2_math", math.eurus2, "prompt, ability, reward_model", "PRIME-RL/Eurus-2-RL-Data",
         "the mathematics of PRIME; coding problems are dropped"),
        ("skywork_math", math.skywork, "prompt, ability, reward_model", "Skywork/Skywork-OR1-RL-Data",
         "the mathematics of Skywork-OR1 (split: math)"),
        ("open_math_reasoning", math.open_math_reasoning, "problem, problem_type, expected_answer",
         "nvidia/OpenMathReasoning",
         "problems of AoPS; rows without an answer by the author of the problem are dropped (split: cot or tir)"),
        ("gsm8k", math.gsm8k, "question, answer", "openai/gsm8k",
         "word problems; the answer is the number after #### (subset: main)"),
        ("math", math.boxed_solution, "problem, solution", "EleutherAI/hendrycks_math",
         "the MATH dataset; the answer is the last box of the solution"),
        ("gpqa", science.gpqa, _GPQA, "Idavidrein/gpqa",
         "graduate questions of biology, physics and chemistry with four options"),
        ("mmlu_pro", science.mmlu_pro, "question, options, answer, answer_index", "TIGER-Lab/MMLU-Pro",
         "questions of many subjects with up to ten options"),
        ("arc", science.arc, "question, choices, answerKey", "allenai/ai2_arc",
         "school questions of science with options"),
        ("sciq", science.sciq, "question, correct_answer, distractor1, distractor2, distractor3", "allenai/sciq",
         "school questions of science with four options"),
        ("scp_116k", science.scp, "problem, matched_solution, solution", "EricLu/SCP-116K",
         "university problems of science whose solution states a short answer"),
        ("scibench", science.scibench, "problem_text, answer_number, unit", "xw27/scibench",
         "university problems of science with a number, accepted within 5%"),
        ("ifeval", instructions.ifeval, "prompt, instruction_id_list, kwargs", "google/IFEval",
         "prompts with instructions of 25 kinds, checked strictly"),
        ("ifeval_loose", instructions.ifeval_loose, "prompt, instruction_id_list, kwargs", "google/IFEval",
         "prompts with instructions of 25 kinds, checked loosely"),
        ("nemotron_ifeval", instructions.nemotron, "input, args", "nvidia/Llama-Nemotron-Post-Training-Dataset",
         "prompts with instructions of IFEval; subset RL, split instruction_following"),
        ("if_multi_constraints", instructions.multi_constraints, "messages, ground_truth",
         "allenai/IF_multi_constraints_upto5",
         "prompts with up to five instructions; those beyond IFEval are dropped"),
        ("rlvr_ifeval", instructions.rlvr, "messages, ground_truth", "allenai/RLVR-IFeval",
         "prompts with one instruction of IFEval"),
        ("apps", code.apps, "question, input_output, starter_code", "codeparrot/apps",
         "programs and functions with cases"),
        ("taco", code.apps, "question, input_output, starter_code, time_limit", "BAAI/TACO",
         "programs and functions with cases, and some time limits"),
        ("code_contests", code.code_contests, f"{_CONTEST}input_file, output_file", "deepmind/code_contests",
         "programs of contests with public, private and generated cases"),
        ("codeforces", code.codeforces, _CODEFORCES, "open-r1/codeforces",
         "programs of Codeforces with official cases; rows with a checker are dropped"),
        ("livecodebench", code.live_code_bench, _LIVE,
         "livecodebench/code_generation_lite, livecodebench/code_generation",
         "programs and functions of recent contests with public and private cases"),
        ("eurus2", code.eurus2, "prompt, ability, reward_model", "PRIME-RL/Eurus-2-RL-Data",
         "mathematics and code of PRIME, by the column `ability`"),
        ("eurus2_code", code.eurus2_code, "prompt, ability, reward_model", "PRIME-RL/Eurus-2-RL-Data",
         "the code of PRIME; mathematics is dropped"),
        ("prime_apps", code.eurus2_of("apps"), _PRIME, "PRIME-RL/Eurus-2-RL-Data",
         "the problems of PRIME from APPS"),
        ("prime_codecontests", code.eurus2_of("codecontests"), _PRIME, "PRIME-RL/Eurus-2-RL-Data",
         "the problems of PRIME from CodeContests"),
        ("prime_codeforces", code.eurus2_of("codeforces"), _PRIME, "PRIME-RL/Eurus-2-RL-Data",
         "the problems of PRIME from Codeforces"),
        ("prime_taco", code.eurus2_of("taco"), _PRIME, "PRIME-RL/Eurus-2-RL-Data",
         "the problems of PRIME from TACO"),
        ("humaneval", code.human_eval, "prompt, canonical_solution, entry_point, test",
         "evalplus/humanevalplus, openai/openai_humaneval", "functions to complete, with test code"),
        ("mbpp", code.mbpp_plus, "code, prompt, test_imports, test_list, test", "evalplus/mbppplus",
         "short functions, with test code"),
        ("mbpp_original", code.mbpp, "text, code, test_list, test_setup_code?, challenge_test_list?",
         "google-research-datasets/mbpp", "short functions, with a few assertions, of which one is shown"),
        ("mbpp_sanitized", code.mbpp, "prompt, code, test_list, test_imports?", "google-research-datasets/mbpp",
         "the corrected part of `mbpp_original` (subset: sanitized)"),
    )
}  # fmt: skip


def find_layout(name: str) -> Layout:
    """Return a layout by its name.

    Raises:
        ValueError: If there is none, with the nearest name.
    """
    if name in LAYOUTS:
        return LAYOUTS[name]
    near = get_close_matches(name.lower(), LAYOUTS, 1)
    advice = f"did you mean {near[0]}?" if near else f"the layouts are {', '.join(LAYOUTS)}"
    raise ValueError(f"data.sources[].layout: {name!r} is not a layout; {advice}")


def layouts_of(data_set: str) -> list[str]:
    """Return the names of the layouts of a dataset on the hub, at any revision; none if it is unknown."""
    return [layout.name for layout in LAYOUTS.values() if split_revision(data_set)[0] in layout.data_sets]


def read_fields(row: Row, layout: Layout, seed: int) -> Fields:
    """Return the fields of a row, which has at least the columns of the layout; the seed shuffles options.

    Raises:
        DroppedRow: If the row has no question that can be verified.
        UserError: If the row is not of this layout.
    """
    try:
        fields = layout.read(row.values, seed)
    except KeyError as error:
        raise _other_layout(row, layout, f"it has no column {str(error.args[0])!r}") from error
    except (ValueError, TypeError, AttributeError) as error:  # the last two: a value of another type
        raise _other_layout(row, layout, str(error)) from error
    for name, text in (("question", fields.text), ("reference answer", fields.reference)):
        if not text.strip():
            raise DroppedRow(f"empty {name}")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DroppedRow(f"{name} with an unpaired surrogate") from None
    return fields


def reasons(dropped: Mapping[str, int]) -> str:
    """Return the reasons for dropped rows with their counts as text, the most frequent first."""
    ordered = sorted(dropped.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)


def all_dropped(path: str, layout: Layout, dropped: Counter[str]) -> UserError:
    """Return the error for data of which no row is left."""
    return UserError(
        f"the layout {layout.name} dropped all {dropped.total():,} rows of {path} ({reasons(dropped)}); choose another "
        "data.sources[].layout, split or file"
    )


def _other_layout(row: Row, layout: Layout, problem: str) -> UserError:
    """Return the error for a row of another layout, with the layouts whose columns it has."""
    columns = set(row.columns)
    fitting = [name for name, other in LAYOUTS.items() if columns.issuperset(other.columns) and other is not layout]
    if fitting:
        advice = f"set data.sources[].layout to one that fits these columns: {' or '.join(fitting)}"
    elif columns.issuperset(layout.columns):
        advice = "fix or delete the row"
    else:
        advice = "no layout fits these columns; name them with data.sources[].prompt_column and answer_column"
    return UserError(
        f"{row.location} is not of the layout {layout.name}: {problem} (columns: {', '.join(row.columns) or 'none'}); "
        f"{advice}"
    )
