"""The Python of README.md and of the documentation, run from an empty folder to the result that the text promises."""

import doctest
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import get_json_schema

import brorl
from brorl.tuning.answer import TuningResult

ROOT = Path(__file__).parents[1]
NOTEBOOK = """
import linecache

for number, cell in enumerate(CELLS):
    name = f"/tmp/ipykernel_1/{number}.py"  # as IPython runs it: the text is known to linecache alone
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
    exec(compile(cell, name, "exec"))
"""
FEWER = {
    "steps=20": "steps=2",
    'match="seconds"': 'match="steps"',
    "budget=30": "budget=2, eval_points=1",
    "seeds=3": "seeds=2",
}


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)


def printed_by(program: str, folder: Path) -> str:
    (folder / "script.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def assert_learned(printed: str) -> None:
    """The text promises about 0.2 before and over 0.9 after."""
    ((before, after),) = re.findall(r"held-out sums: ([\d.]+) before, ([\d.]+) after", printed)
    assert float(before) < 0.35
    assert float(after) > 0.8


RUN_HERE = {  # `own_model_and_data` runs with its commands in test_tutorials
    "README.md", "docs/explanation/tree.md", "docs/how-to/merge_adapters.md", "docs/how-to/python.md",
    "docs/how-to/reward_terms.md", "docs/how-to/tools.md", "docs/how-to/tune.md", "docs/how-to/verifiers.md",
    "docs/reference/run_directory.md", "docs/tutorials/own_model_and_data.md",
}  # fmt: skip


def test_every_block_is_run_by_a_test() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert {str(page.relative_to(ROOT)) for page in pages if blocks(str(page.relative_to(ROOT)))} == RUN_HERE


def test_the_functions_of_the_page_on_verifiers_judge() -> None:
    space: dict[str, Any] = {}
    for block in blocks("docs/how-to/verifiers.md"):
        exec(block, space)
    assert [space["check"](response, "42") for response in ("It is 42 ", "It is 41")] == [True, False]
    assert space["reward"](["It is 42", "It is 41"], ["42", "42"]) == [1.0, 0.0]


def test_the_blocks_on_tools_are_a_tool_a_format_and_an_environment() -> None:
    tool, form, game = blocks("docs/how-to/tools.md")
    spaces: list[dict[str, Any]] = [{"TABLE": {("USD", "2026-01-31"): 0.9}}, {}, {}]
    for block, space in zip((tool, form, game), spaces, strict=True):
        exec(block, space)
    schema = get_json_schema(spaces[0]["exchange_rate"])["function"]
    assert [*schema["parameters"]["properties"]] == schema["parameters"]["required"] == ["currency", "day"]
    assert spaces[0]["exchange_rate"]("USD", "2026-01-31") == 0.9
    assert spaces[1]["parse"]("[12 * 34] [5]") == [{"name": "calculator", "arguments": {"expression": "12 * 34"}}]
    assert "408" in spaces[1]["render"]([("calculator", "408")])
    played = spaces[2]["Game"]()
    assert played.reset(secret=4, question="?") == "Guess a number from 0 to 9."
    assert [played.guess(number) for number in (3, 7, 4)] == ["higher", "lower", "right"]
    assert played.get_reward() == 1.0


def test_the_block_on_tuning_prints_an_answer_without_a_final(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = TuningResult(Path("runs/tune"), "Keep your recipe.", None, (), None)
    monkeypatch.setattr(brorl, "tune", lambda *_, **__: result)
    (block,) = blocks("docs/how-to/tune.md")
    exec(block, {"brorl": brorl})
    assert capsys.readouterr().out == "Keep your recipe.\n"


@pytest.mark.example
def test_the_block_on_reward_terms_learns(tmp_path: Path) -> None:
    (block,) = blocks("docs/how-to/reward_terms.md")
    assert_learned(printed_by(block, tmp_path))


@pytest.mark.example
def test_the_blocks_that_read_a_run_work(tmp_path: Path) -> None:
    """A run of all weights for the tree and the files, and one of an adapter for the merge."""
    settings = (
        "steps=1, rollouts_per_prompt=16, prompts_per_step=4, output_dir='runs/mine', progress=False, "
        "evaluation={'num_prompts': 4, 'rollouts_per_prompt': 4, 'ks': [1]}"
    )
    for lora, pages, check in (
        ({}, ("docs/explanation/tree.md", "docs/reference/run_directory.md"),
         "print(int(tree.leaf_count.sum()), tree.num_unique_tokens < tree.num_sampled_tokens, logprob_M.requires_grad, "
         "{'prompt', 'correct'} <= {*rows[0]})"),
        ({"rank": 4}, ("docs/how-to/merge_adapters.md",),
         "from transformers import AutoModelForCausalLM\n"
         "merged = AutoModelForCausalLM.from_pretrained('merged')\nprint('lora' in str(merged).lower())"),
    ):  # fmt: skip
        folder = tmp_path / f"rank-{lora.get('rank', 0)}"
        folder.mkdir()
        train = f"import brorl\nbrorl.train('quickstart', {settings}, lora={lora})\n"
        printed = printed_by("\n".join([train, *(block for page in pages for block in blocks(page)), check]), folder)
        assert printed.splitlines()[-1] == ("False" if lora else "512 True True True")


@pytest.mark.slow
def test_the_examples_of_the_page_work(tmp_path: Path) -> None:
    """As cells of a notebook."""
    page = "docs/how-to/python.md"
    calls = re.findall(r"^\| `(brorl\.[^`]*)` \|", (ROOT / page).read_text("utf-8"), re.MULTILINE)
    assert (len(blocks(page)), len(calls)) == (5, 7)
    shown = [  # files that the page only names; `tune` takes half an hour and has tests of its own
        call.replace(', "runs/other"', "").replace("responses.jsonl", "runs/first-evaluation")
        for call in calls
        if not call.startswith("brorl.tune")
    ]
    cells = [*blocks(page), *(f"print(repr({call}))" for call in shown)]
    printed = printed_by(f"CELLS = {cells!r}\n{NOTEBOOK}", tmp_path)
    assert "held-out pass@1:" in printed
    assert "difference in pass@1:" in printed
    assert_learned(printed)
    for name in ("DataResult", "CheckResult", "SampledTree", "Samples", "Report", "VerifyResult"):
        assert re.search(rf"^{name}\(", printed, re.MULTILINE), name


@pytest.mark.example
def test_the_python_block_of_the_readme_works(tmp_path: Path) -> None:
    """With fewer steps and seeds."""
    (block,) = blocks("README.md")
    for number, fewer in FEWER.items():
        assert block.count(number) == 1
        block = block.replace(number, fewer)
    assert "4/4" in printed_by(block, tmp_path)  # two arms with two seeds
    assert (tmp_path / "runs" / "plan" / "plan.json").is_file()
    (comparison,) = tmp_path.glob("runs/compare-*/comparison.json")
    assert '"N=512"' in comparison.read_text()
    assert (tmp_path / "runs" / "mine" / "report.html").is_file()


EXAMPLES = [
    "algorithms.advantages", "algorithms.rewards", "tree", "verdict", "verification.domains.denial",
    "verification.domains.lexicon", "verification.sandbox.values", "verification.thoughts",
]  # fmt: skip


def test_the_list_of_modules_with_examples_is_complete() -> None:
    """The examples of `brorl.api` train, so pages of the documentation run them."""
    package = ROOT / "src" / "brorl"
    files = (file.relative_to(package) for file in package.rglob("*.py") if " >>> " in file.read_text("utf-8"))
    modules = {".".join(file.with_suffix("").parts) for file in files}
    assert {module for module in modules if not module.startswith("api.")} == {*EXAMPLES}


@pytest.mark.parametrize("module", EXAMPLES)
def test_the_examples_of_docstrings_are_true(module: str) -> None:
    done = doctest.testmod(import_module(f"brorl.{module}"))
    assert done.attempted > 0
    assert done.failed == 0
