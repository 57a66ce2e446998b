"""`brorl check` shows what a run would do, writes nothing, and stops with one line at the first thing that is wrong."""

import json
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from brorl.config.reading import make_config, parse_yaml, read_recipe
from brorl.config.settings import TrainConfig
from brorl.planning import step_forecast
from brorl.planning.step_cost import StepTimer, StepTiming, mean_rounds
from brorl.prompts.prompt import Prompt
from brorl.training.inputs import prepare_run
from brorl.training.local_parts import LocalParts
from brorl.tree import RolloutTree
from data_files import write_rows
from recipes import recipe
from run_support import SMALL, command, refused, save_tiny_model
from tool_chats import PLAIN, QWEN

EVERY_CHARACTER = "".join(map(chr, range(32, 127))) + "\n"


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
refusal = partial(refused, "check")


def contents() -> list[Path]:
    return sorted(Path().rglob("*"))


def yaml_value(text: str) -> object:
    return parse_yaml(text, "an option")


def test_a_check_from_end_to_end() -> None:
    options = (*SMALL, "--steps=3", "--output_dir=run")
    outcome = command("check", *options)
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert contents() == []
    config = config_of("--steps=3")
    ready = prepare_run(config, config.model)
    lengths = [len(p.token_ids) for p in (*ready.prompts.train.prompts, *ready.prompts.held_out)]
    first = ready.prompts.train.prompts[0]
    for said in (
        "settings of quickstart: ok",
        f"countdown: {ready.prompts.train.num_prompts:,} training prompts, 2 held out",
        f"median length {np.median(lengths):g} tokens, longest {max(lengths)}",
        f"{first.id} (countdown, {len(first.token_ids)} tokens), reference: {first.reference}",
        f"<bos>{first.text}",  # what the tokenizer adds is shown
        "memory: about",
        "extrapolated to 16 rollouts x 4 prompts",
        "nothing was written; train with: brorl train quickstart --",
    ):
        assert said in outcome.said
    names_and_values = shlex.split(outcome.out.partition("brorl train quickstart ")[2])
    given = dict(zip(names_and_values[::2], map(yaml_value, names_and_values[1::2]), strict=True))
    assert given == {name: yaml_value(value) for name, value in (option.split("=", 1) for option in options)}
    verified = re.findall(r"(reference|different) answer, as the response `([^`]*)`: (correct|incorrect)", outcome.out)
    assert [(which, judged) for which, _, judged in verified] == [("reference", "correct"), ("different", "incorrect")]
    assert eval(verified[0][1]) == int(first.reference.split(" -> ")[1])
    seconds = re.search(r"seconds per step: about ([\d.]+) \((.*)\)", outcome.out)
    assert seconds
    phases = [float(phase.split()[1]) for phase in seconds[2].split(", ")]
    assert float(seconds[1]) == pytest.approx(sum(phases), rel=0.05)


def test_sources_are_shown_one_by_one(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny", characters=EVERY_CHARACTER, max_positions=256)
    for name, factor in (("easy", 1), ("hard", 100)):
        rows = [{"prompt": f"{i * factor} + 1?", "answer": str(i * factor + 1)} for i in range(1, 9)]
        write_rows(f"{name}.jsonl", rows)
    options = ("--data.sources=[easy.jsonl, hard.jsonl]", "--data.held_out_fraction=0.3", "--sampling.max_new_tokens=8")
    outcome = command("check", *options, f"--model={model}", "--prompt.system_prompt=Be brief.", "--no-timing")
    assert outcome.code == 0, outcome
    for name in ("easy", "hard"):
        assert f"{name}: " in outcome.out
        assert re.search(rf"question {name}:\d with the reference answer", outcome.out)
    assert outcome.out.count("| Be brief.") == 2
    assert "seconds" not in outcome.out


def config_of(*overrides: str) -> TrainConfig:
    from brorl.config.reading import parse_yaml

    pairs = (text.removeprefix("--").partition("=") for text in (*SMALL, *overrides))
    return make_config(read_recipe("quickstart"), {name: parse_yaml(value, name) for name, _, value in pairs}, "test")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--output_dir=used"], "output_dir used exists and is not empty"),
        (["--data.max_prompt_tokens=3"], "has more than data.max_prompt_tokens = 3"),
        (["--engine.memory_gib=100000", "--sampling.max_new_tokens=30", "--rollouts_per_prompt=900000000"], "memory"),
    ],
)
def test_the_first_thing_that_is_wrong_is_one_line(arguments: list[str], said: str) -> None:
    Path("used").mkdir()
    Path("used/notes.txt").touch()
    assert said in refusal(*arguments)


@pytest.mark.slow
def test_the_seconds_of_a_step_follow_from_those_of_smaller_ones(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With phases that cost known amounts of what they work on, the forecast is what a whole step would cost."""
    per_unit = {"generation": "unique_tokens", "training": "trained_nodes", "storing": "responses"}
    cost = {phase: float(rng.uniform(0.5, 2)) for phase in per_unit}
    finish = StepTimer.finish

    def timed(self: StepTimer, *arguments: object) -> StepTiming:
        timing = finish(self, *arguments)  # type: ignore[arg-type]
        seconds = {phase: cost[phase] * getattr(timing.work, unit) for phase, unit in per_unit.items()}
        return replace(timing, seconds={**seconds, "verification": 1e-9, "diagnostics": 1e-9})

    monkeypatch.setattr(StepTimer, "finish", timed)
    config = config_of("--rollouts_per_prompt=64", "--prompts_per_step=8", "--dynamic_sampling.enabled=false")
    parts = LocalParts.load(config, prepare_run(config, config.model))
    sampled = []
    sample = step_forecast.sample_groups

    def seen(*arguments: object) -> object:
        sampled.append(sample(*arguments))  # type: ignore[arg-type]
        return sampled[-1]

    monkeypatch.setattr(step_forecast, "sample_groups", seen)
    monkeypatch.setattr(step_forecast, "_SECONDS", float("inf"))
    forecast = step_forecast.forecast_step(parts, tmp_path)
    trees = [group.tree for group in sampled[-1].groups]  # type: ignore[attr-defined]
    assert [tree.num_rollouts for tree in trees] == [64] * 8  # the last step is as large as the step in question
    nodes, responses = sum(t.num_unique_tokens for t in trees), sum(t.num_responses for t in trees)
    assert forecast.seconds["generation"] == pytest.approx(cost["generation"] * nodes, rel=1e-6)
    assert forecast.seconds["training"] == pytest.approx(cost["training"] * nodes, rel=1e-6)
    assert forecast.seconds["storing"] == pytest.approx(cost["storing"] * responses, rel=1e-6)
    assert forecast.max_seconds == forecast.seconds["total"]  # nothing was cut short of the limit
    assert (forecast.kept_fraction, forecast.num_prompts) == (None, 8)
    assert forecast.num_rollouts == sum(tree.num_rollouts for one in sampled[2:] for tree in trees_of(one))

    monkeypatch.setattr(step_forecast, "MAX_TOKENS", 3)
    cut = step_forecast.forecast_step(parts, tmp_path)
    unfinished = sum(int(t.leaf_count[~t.finished].sum()) for t in trees_of(sampled[-1]))
    added = unfinished * (config.sampling.max_new_tokens - 3) * (cost["generation"] + cost["training"])
    assert cut.max_seconds == pytest.approx(cut.seconds["total"] + added, rel=1e-6)
    assert unfinished > 0
    assert cut.truncation_rate == pytest.approx(unfinished / (8 * 64))

    monkeypatch.setattr(step_forecast, "MAX_TOKENS", 128)
    few = replace(parts, config=recipe(parts.config, max_responses_per_outcome=2))
    limited = step_forecast.forecast_step(few, tmp_path)
    nodes = np.mean([  # of trees of 4 of the 64 rollouts
        RolloutTree.from_responses((1,), [rollouts[i] for i in rng.choice(64, 4, replace=False)]).num_unique_tokens
        for tree in trees_of(sampled[-1])
        for rollouts in [[tokens for tokens, count in tree.responses() for _ in range(count)]]
        for _ in range(50)
    ])  # fmt: skip
    assert limited.seconds["training"] == pytest.approx(cost["training"] * 8 * nodes, rel=0.15)


@pytest.mark.slow
def test_the_timing_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that counts rollouts times the limit of tokens, no step begins that would end after the limit."""
    clock, drawn, said = [0.0], list[tuple[int, int]](), list[str]()
    config = config_of("--rollouts_per_prompt=16", "--prompts_per_step=8", "--sampling.max_new_tokens=12")
    parts = LocalParts.load(config, prepare_run(config, config.model))
    sampled = step_forecast.sample_groups(parts, parts.stream.take(1), 2, 0)
    timing = StepTimer(parts, parts.model, tmp_path).finish(sampled)

    def slow(_parts: LocalParts, prompts: list[Prompt], num_rollouts: int, seed: int) -> object:  # noqa: ARG001
        clock[0] += seconds_per_token * num_rollouts * len(prompts) * 12
        drawn.append((num_rollouts, len(prompts)))
        return sampled

    monkeypatch.setattr(step_forecast, "sample_groups", slow)
    monkeypatch.setattr(StepTimer, "finish", lambda *_: timing)
    monkeypatch.setattr(step_forecast, "perf_counter", lambda: clock[0])
    for seconds_per_token, sizes, is_stopped in (
        (0.01, [(2, 1), (2, 1), (8, 2), (16, 4)], False),  # 0.2, 0.2, 1.9 and 7.7 s
        (0.1, [(2, 1), (2, 1), (8, 2), (4, 1)], False),  # 2.4, 2.4, 19 and 5 s
        (0.5, [(2, 1), (2, 1)], True),  # 12 s twice, and 96 s would follow
        (5.0, [(2, 1)], True),  # 120 s: not even a second one
    ):
        clock[0] = 0.0
        forecast = step_forecast.forecast_step(parts, tmp_path, (1, 2), 60.0, said.append)
        assert drawn[: len(sizes)] == sizes
        assert forecast.is_stopped is is_stopped
        assert len(drawn) == len(sizes) or not is_stopped
        assert clock[0] <= max(60, seconds_per_token * 2 * 12)
        drawn.clear()
    assert len(said) == 4


@pytest.mark.slow
def test_cut_responses_tell_nothing_about_mixed_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated responses are graded incorrect, whatever they would have become."""
    monkeypatch.setattr(step_forecast, "MAX_TOKENS", 2)
    model = save_tiny_model(tmp_path / "tiny")
    outcome = command("check", *SMALL, f"--model={model}", "--sampling.max_new_tokens=8")
    assert outcome.code == 0, outcome
    assert re.search(
        r"\d+% of the measured responses were truncated at 2 tokens; if all of these grow to 8, ", outcome.said
    )
    assert "so the fraction of mixed groups was not measured" in outcome.said
    assert "none of the measured groups is mixed" not in outcome.said
    assert "truncated at sampling.max_new_tokens" not in outcome.said  # unknown


def test_a_model_that_solves_nothing_and_responses_that_are_cut_are_warned_of(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    outcome = command("check", *SMALL, f"--model={model}", "--sampling.max_new_tokens=2")
    assert outcome.code == 0, outcome
    assert re.search(
        r"warning: \d+% of the rollouts were truncated at sampling\.max_new_tokens; raise it", outcome.said
    )
    assert "warning: none of the measured groups is mixed (correct and incorrect rollouts)" in outcome.said


@pytest.mark.slow
def test_thoughts_are_named(tmp_path: Path) -> None:
    """The thoughts that the template opens, and how many of them a random model leaves open at the limit."""
    from brorl.model.load import load_tokenizer

    model = save_tiny_model(tmp_path / "tiny", characters=EVERY_CHARACTER, max_positions=256)
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = (
        "{{ messages[0]['content'] }}\n<think>\n{% if enable_thinking is defined and not enable_thinking %}</think>\n"
        "{% endif %}"
    )
    tokenizer.save_pretrained(model)
    options = (*SMALL, f"--model={model}", "--sampling.max_new_tokens=4", "--rollouts_per_prompt=8")
    outcome = command("check", *options)
    assert outcome.code == 0, outcome
    found = re.search(
        r"thoughts: all prompts end with <think>, which opens a thought; (\d+) of (\d+) measured rollouts contain a "
        r"thought, and (\d+) were truncated inside it \(at 4 tokens; sampling.max_new_tokens = 4\); built-in verifiers "
        r"judge what follows </think>", outcome.said,
    )  # fmt: skip
    assert found, outcome.said
    thinking, rollouts, cut = map(int, found.groups())
    assert 0 < cut <= thinking == rollouts
    for more in ("--prompt.chat_template_options={enable_thinking: false}", "--verification.thought_tags=null"):
        assert "thoughts: " not in command("check", *options, "--no-timing", more).said


def trees_of(sampled: object) -> list[RolloutTree]:
    return [group.tree for group in sampled.groups]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_prompts_that_dynamic_sampling_drops_cost_too(tmp_path: Path) -> None:
    config = config_of("--rollouts_per_prompt=16", "--prompts_per_step=8")
    parts = LocalParts.load(config, prepare_run(config, config.model))
    forecast = step_forecast.forecast_step(parts, tmp_path)
    assert forecast.kept_fraction is not None
    assert 0.2 < forecast.kept_fraction < 1
    assert mean_rounds(forecast.kept_fraction, 8) >= 1


SUM = 'def add(a, b):\n    """Add."""\n'


@pytest.mark.slow
def test_stored_solutions_are_tried_on_the_tests(tmp_path: Path, rng: np.random.Generator) -> None:
    """Solutions of several questions are tried, because one can be wrong; without a solution, none is rejected."""
    model = save_tiny_model(tmp_path / "tiny", characters=EVERY_CHARACTER, max_positions=1024)
    bodies = ["    return a + b\n", "    return b + a\n", "    return sum((a, b))\n", "    return a\n"]
    rng.shuffle(bodies)  # the first solution can be the wrong one
    rows = [
        {"prompt": SUM.replace("Add", f"Add {number}"), "canonical_solution": body, "entry_point": "add",
         "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n"}
        for number, body in enumerate(bodies)
    ]  # fmt: skip
    wrong = 1 + bodies.index("    return a\n")
    write_rows("he.jsonl", rows)
    source, cases = "--data.sources={path: he.jsonl, layout: humaneval}", {"inputs": ["2\n"], "outputs": ["2\n"]}
    options = (f"--model={model}", "--no-timing", "--data.held_out_fraction=0", "--evaluation.num_prompts=0")
    outcome = command("check", source, *options)
    assert outcome.code == 0, outcome
    assert "stored solutions of 4 questions: 3 accepted" in outcome.out
    assert (
        f"warning: the stored solution is rejected, fix or delete these rows: he:{wrong} (wrong answer)" in outcome.out
    )
    assert "your function" not in outcome.out

    row = {"question": "Print the number in the first line.", "input_output": json.dumps(cases), "starter_code": ""}
    Path("apps.jsonl").write_text(json.dumps(row) + "\n")
    outcome = command("check", source.replace("he.", "apps.").replace("humaneval", "apps"), *options)
    assert outcome.code == 0, outcome
    assert "no stored solution: no response to this question is known to be correct" in outcome.out
    assert "your function" not in outcome.out
    assert "rejected" not in outcome.out


def chat_model(folder: Path, template: str | None) -> Path:
    """Save a random model whose tokenizer has a chat template and a single special token, which ends turns."""
    save_tiny_model(folder, characters=EVERY_CHARACTER, max_positions=8192)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template and template.replace("<|im_end|>", "<eos>")
    tokenizer.save_pretrained(folder)
    return folder


def transcript(said: str) -> str:
    """Return the lines about tools."""
    return said[said.index("\ntools: ") : said.index("it writes its next turn")]


WITH_TOOLS = ("--tools.calculator=true", "--evaluation.num_prompts=0", "--no-timing")


@pytest.mark.parametrize(("form", "template"), [("auto", QWEN), pytest.param("hermes", PLAIN, marks=pytest.mark.slow)])
def test_the_first_transcript_with_tools(form: str, template: str, tmp_path: Path) -> None:
    model = chat_model(tmp_path / form, template)
    outcome = command("check", *SMALL, f"--model={model}", *WITH_TOOLS, f"--tools.format={form}")
    assert outcome.code == 0, outcome
    lines = transcript(outcome.out).splitlines()
    by = "the chat template" if form == "auto" else "a text that brorl adds"
    assert lines[1] == f"tools: calculator; shown by {by}; calls in the form of hermes"
    turn, reply = (
        "\n".join(line[4:] for line in part.splitlines() if line.startswith("  "))
        for part in "\n".join(lines).split("it is given ")
    )
    call = re.fullmatch("<tool_call>\n(.*)\n</tool_call><eos>", turn)
    assert call
    assert json.loads(call[1]) == {"name": "calculator", "arguments": {"expression": "..."}}
    result = "\n<|im_start|>user\n<tool_response>\n...\n</tool_response><eos>\n<|im_start|>assistant\n"
    assert reply == result
    assert f"it is given {len(result) - 4} tokens with" in outcome.out  # a token a character, but for <eos>
    prompt = outcome.out[: outcome.out.index("verified as")]
    assert "  | <|im_start|>system\n" in prompt
    assert '"name": "calculator"' in prompt
    assert prompt.endswith("<eos>\n  | <|im_start|>assistant\n  | \n")


@pytest.mark.slow
@pytest.mark.usefixtures("same_import_path")
def test_the_first_transcript_in_a_form_of_the_user(tmp_path: Path) -> None:
    Path("mine.py").write_text("def parse(text): return []\ndef render(results): return f'={results[0][1]}\\n'")
    model = chat_model(tmp_path / "model", None)
    arguments = (f"--model={model}", *WITH_TOOLS, "--tools.format=mine.py", "--prompt.chat=never")
    outcome = command("check", *SMALL, *arguments)
    assert outcome.code == 0, outcome
    lines = transcript(outcome.out).splitlines()
    assert lines[1].startswith("tools: calculator; shown by nothing; calls in the form of ")
    assert lines[-3:] == [
        "it is given 5 tokens with the result ..., and is not trained on them:", "  | =...", "  | "
    ]  # fmt: skip


def test_tools_that_the_model_cannot_be_shown(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "model", PLAIN)
    message = refusal(*SMALL, f"--model={model}", *WITH_TOOLS)
    assert "does not show the tools; set tools.format: hermes" in message
    message = refusal(*SMALL, f"--model={model}", *WITH_TOOLS, "--tools.format=hermes", "--sampling.stop=[Question]")
    assert "sampling.stop contains 'Question', but with tools a turn ends" in message
