"""Rollouts in the terminal: the right ones, in order of count, with nothing that acts on the terminal."""

import html
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models

from brorl.algorithms.groups import Group
from brorl.api.stored_runs import samples
from brorl.errors import UserError
from brorl.format import visible_text
from brorl.reporting.samples import MAX_PROMPTS, Kind
from brorl.runs.run_directory import RunDirectory
from made_up_runs import held_out_answers, make_run, random_step
from small_models import with_given

Run = tuple[Path, dict[int, list[Group]]]


@pytest.fixture
def run(tmp_path: Path, rng: np.random.Generator) -> Run:
    _, stored = make_run(tmp_path / "run", rng, steps=4, num_groups=5, num_rollouts=40)
    return tmp_path / "run", stored


def shown(
    run: Path, step: int | None = None, prompt: str | None = None, kind: Kind = "all", limit: int = 5, width: int = 80
) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(samples(run, step=step, prompt=prompt, kind=kind, limit=limit), soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_last_step_and_its_most_mixed_prompt_by_default(run: Run) -> None:
    path, stored = run
    groups = stored[4]
    found = samples(path)
    assert found.step == 4
    assert not found.chosen
    distance = [abs(g.num_correct / g.tree.num_rollouts - 0.5) for g in groups]
    assert found.number == distance.index(min(distance)) + 1
    for row, group in zip(found.rows, groups, strict=True):
        assert (row.num_correct, row.num_rollouts) == (group.num_correct, group.tree.num_rollouts)
        assert row.num_responses == group.tree.num_responses
        assert row.num_truncated == group.tree.leaf_count[~group.tree.finished].sum()
    text = shown(path)
    rollouts = sum(g.tree.num_rollouts for g in groups)
    assert f"5 prompts, {rollouts} rollouts" in text.splitlines()[0]
    assert f"{sum(g.num_correct for g in groups) / rollouts:.1%} correct" in text.splitlines()[0]
    listed = [line.split()[:2] for line in text.splitlines() if re.match(r" *\d+ +\d+/\d+ ", line)]
    order = sorted(range(5), key=lambda i: -groups[i].num_correct / groups[i].tree.num_rollouts)
    assert listed == [[str(i + 1), f"{groups[i].num_correct}/{groups[i].tree.num_rollouts}"] for i in order]


@pytest.mark.parametrize("kind", ["all", "right", "wrong"])
def test_responses_by_count_with_what_was_said_of_them(run: Run, kind: Kind) -> None:
    path, stored = run
    for number, group in enumerate(stored[2], 1):
        chosen = [i for i, v in enumerate(group.verdicts) if kind == "all" or v.correct == (kind == "right")]
        chosen.sort(key=lambda i: -group.tree.leaf_count[i])
        text = shown(path, step=2, prompt=str(number), kind=kind, limit=3, width=4000)
        place = 0
        for i in chosen[:3]:
            verdict, nodes = group.verdicts[i], group.tree.path(int(group.tree.leaf[i]))
            answer = "no answer found  " if verdict.reason in ("no answer", "no code block") else ""
            if verdict.extracted is not None:
                answer = f"extracted answer: {visible_text(verdict.extracted.strip(), one_line=True)}  "
            mean = np.mean([np.float32(x).astype(float) for x in group.tree.logprob[nodes]])
            known = f"mean log-prob {mean:.3f}" if np.isfinite(mean) else "log-probs unknown"
            reason = visible_text(verdict.reason.strip(), one_line=True)
            line = (
                f"\n{group.tree.leaf_count[i]}x {reason}  {answer}reward {group.reward_L[i]:g}  "
                f"{len(nodes)} token{'s' * (len(nodes) > 1)}  {known}\n"
            )
            place = text.index(line, place) + len(line)
            shown_text = visible_text(group.texts[i]).expandtabs()
            assert text[place:].startswith(shown_text.partition("\n")[0].rstrip())
        assert len(re.findall(r"^\d+x ", text, re.MULTILINE)) == min(len(chosen), 3)
        if len(chosen) > 3:
            assert f"`limit={len(chosen)}` shows all" in text
        assert shown(path, 2, str(number), kind, limit=1000, width=4000).count("  reward ") == len(chosen)


def a_run_with_tools(path: Path, rng: np.random.Generator, checkpoint: bool) -> list[Group]:
    """Two groups whose rollouts called tools, and one whose rollouts did not."""
    step = random_step(rng, 3, 40)
    groups = [replace(g, tree=with_given(g.tree, rng)) for g in step[:2]]
    made = [*groups, step[2]]
    RunDirectory(path).write_responses("rollouts", 1, made)
    (path / "config.yaml").touch()
    if checkpoint:
        folder = path / "checkpoints" / "step-000001"
        folder.mkdir(parents=True)
        save_letters(folder)
    return made


def save_letters(folder: Path) -> None:
    """A tokenizer whose token 1 is a line end and a letter, and whose token 4 is special."""
    tokenizer = Tokenizer(models.WordLevel({"@": 0, "\nb": 1, "c": 2, "d": 3, "<end>": 4}, unk_token="@"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def test_a_margin_says_who_wrote_each_line(tmp_path: Path, rng: np.random.Generator) -> None:
    made = a_run_with_tools(tmp_path, rng, checkpoint=True)
    texts = ["@", "\nb", "c", "d", "<end>"]
    for number, group in enumerate(made[:2], 1):
        tree, text = group.tree, shown(tmp_path, 1, str(number), limit=1000, width=4000)
        expected = []
        for i, parts in enumerate(tree.parts()):
            lines = []
            for at, (tokens, given) in enumerate(parts, 1):
                last = "answer" if tree.finished[i] else "cut"
                margin = "result" if given else "call" if at < len(parts) else last
                written = "".join(texts[t] for t in tokens)
                first, *more = (written.strip("\n") if given else written).split("\n")
                lines += [f"{margin:>6} \u2502 {first}", *(f"       \u2502 {line}" for line in more)]
            expected.append((int(tree.leaf_count[i]), "\n".join(lines)))
            turns = sum(not given for _, given in parts)
            facts = f"{turns} turn{'s' * (turns > 1)}  {tree.length[i]} token{'s' * bool(tree.length[i] > 1)}"
            assert f"{facts}, {sum(len(tokens) for tokens, given in parts if given)} given  mean log-prob" in text
        place = 0
        for _, lines in sorted(expected, key=lambda pair: -pair[0]):
            place = text.index(f"\n{lines}\n", place) + len(lines)
        called = int(tree.count[tree.first_given].sum())
        assert f"distinct responses, {called} turns with calls, {tree.first_given.size} of them distinct" in text
    assert "\u2502" not in shown(tmp_path, 1, "3", limit=1000)
    assert "turns with calls" not in shown(tmp_path, 1, "3")
    mean = made[0].tree.num_turns / 40
    assert re.search(rf"^1 .* {mean:.2f}  ", shown(tmp_path, 1, width=300), re.MULTILINE)


def test_the_stored_text_is_shown_where_no_tokenizer_is_known(tmp_path: Path, rng: np.random.Generator) -> None:
    made = a_run_with_tools(tmp_path, rng, checkpoint=False)
    text = shown(tmp_path, 1, "1", limit=1000, width=4000)
    assert "\u2502" not in text
    responses = made[0].tree.num_responses
    assert text.count("the tokenizer that shows all turns is missing") == responses
    assert all(visible_text(one).expandtabs().partition("\n")[0].rstrip() in text for one in made[0].texts)


def test_before_a_checkpoint_the_tokenizer_is_that_of_the_model(tmp_path: Path, rng: np.random.Generator) -> None:
    a_run_with_tools(tmp_path, rng, checkpoint=False)
    (tmp_path / "model").mkdir()
    save_letters(tmp_path / "model")
    for model, has_one in (
        (str(tmp_path / "model"), True), ("quickstart", True), (str(tmp_path / "gone"), False), ("no/model", False),
        ("not a hub id", False),
    ):  # fmt: skip
        (tmp_path / "config.yaml").write_text(f"model: {model}\n")
        assert ("is missing" in shown(tmp_path, 1, "1")) != has_one, model


def test_a_prompt_by_its_name(run: Run) -> None:
    path, stored = run
    found = samples(path, step=4, prompt=stored[4][1].prompt.id)
    assert found.number == 2  # of two groups of one prompt the first
    assert found.chosen
    assert found.group is not None
    assert found.group.tree.num_unique_tokens == stored[4][1].tree.num_unique_tokens


def test_nothing_acts_on_the_terminal(run: Run) -> None:
    path, stored = run
    for number in range(1, 6):
        text = shown(path, prompt=str(number), limit=1000)
        assert visible_text(text) == text
        assert "[bold red]markup[/bold red]" in text  # rich's own markup is text too
    assert visible_text(shown(path)) == shown(path)
    assert stored


def test_tables_fit_a_terminal(run: Run, rng: np.random.Generator) -> None:
    path, _ = run
    step = random_step(rng, 60, 12, long=500)
    RunDirectory(path).write_responses("rollouts", 50, step)
    lines = shown(path).splitlines()
    table = [line for line in lines if re.match(r" *\d+ +\d+/\d+ ", line)]
    assert len(table) == MAX_PROMPTS
    assert max(len(line) for line in table) <= 80
    assert any(line.split() == ["#", "correct", "pass", "rate", "distinct", "cut", "question"] for line in lines)
    assert any("20 of 60 prompts, evenly spaced by pass rate" in line for line in lines)


def test_the_list_shows_questions_without_what_stands_around_them(tmp_path: Path, rng: np.random.Generator) -> None:
    step = random_step(rng, 3, 8)
    RunDirectory(tmp_path).write_responses("rollouts", 1, step)
    (tmp_path / "config.yaml").touch()
    listed, _, responses = shown(tmp_path, width=300).partition("\nprompt ")
    for group in step:
        assert visible_text(group.prompt.question.strip(), one_line=True) in listed
    assert "You are told this" not in listed
    assert "You are told this before every question." in responses  # a prompt's responses stand below all of it


def test_kinds_that_do_not_occur(tmp_path: Path, rng: np.random.Generator) -> None:
    step = random_step(rng, 2, 8)
    groups = [replace(g, verdicts=[replace(v, correct=False) for v in g.verdicts]) for g in step]
    RunDirectory(tmp_path).write_responses("rollouts", 1, groups)
    (tmp_path / "config.yaml").touch()
    assert "no prompt of this step has correct responses" in shown(tmp_path, kind="right")
    assert "no correct responses" in shown(tmp_path, prompt="2", kind="right")


def test_what_is_not_there_is_named_with_what_is(run: Run, tmp_path: Path) -> None:
    path, _ = run
    for folder, step, prompt, said in (
        (path, 3, None, r"contains no rollouts of step 3; it has steps 2, 4$"),
        (path, 4, "6", r"step 4 of .* has no prompt 6; give a number from 1 to 5, or a name such as "),
        (path, 4, "0\x1b", r"has no prompt 0\\x1b; give"),
        (tmp_path / "none", None, None, r"there is no run directory"),
        (tmp_path, None, None, r"is not a run directory"),
    ):
        with pytest.raises(UserError, match=said) as error:
            samples(folder, step=step, prompt=prompt)
        assert "\n" not in str(error.value)
    (tmp_path / "config.yaml").write_text("store_rollouts_every: 0\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(UserError, match=r"contains no rollouts: The run disabled this \(store_rollouts_every: 0\)"):
        samples(tmp_path)
    with pytest.raises(UserError, match=r"contains no evaluations: The run disabled this"):
        samples(tmp_path, held_out=True)


def test_the_responses_to_held_out_prompts(run: Run, rng: np.random.Generator) -> None:
    path, _ = run
    answers = held_out_answers(rng, [group.prompt for group in random_step(rng, 2, 2)], 30)
    RunDirectory(path).write_responses("evaluations", 3, answers)
    found = samples(path, step=3, held_out=True)
    assert [row.num_correct for row in found.rows] == [group.num_correct for group in answers]
    assert [row.prompt_id for row in found.rows] == [group.prompt.id for group in answers]
    console = Console(file=io.StringIO(), width=200)
    console.print(found, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    rollouts = sum(group.tree.num_rollouts for group in answers)
    first = console.file.getvalue().splitlines()[0]
    assert first.startswith("held-out prompts at step 3 of ")
    assert f"2 prompts, {rollouts} rollouts" in first
    with pytest.raises(UserError, match="contains no rollouts of step 3"):
        samples(path, step=3)


def test_a_notebook_shows_the_text_of_the_terminal_and_no_markup_of_the_model(run: Run) -> None:
    path, stored = run
    for number in range(1, 6):
        found = samples(path, step=4, prompt=str(number), limit=1000)
        page = found._repr_html_()
        assert "<script" not in page
        assert "<img" not in page
        text = html.unescape(re.sub(r"<[^>]+>", "", page))
        for count in stored[4][number - 1].tree.leaf_count:
            assert f"{count}x " in text
