"""Tasksets of `verifiers`: written as rows, scored by their rewards, trained on, and refused when they cannot be."""

import json
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import distributions
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from brorl.config.reading import make_config, read_recipe
from brorl.evaluation.questions import build_questions
from brorl.verification.gym import taskset
from run_support import command, refused, save_tiny_model

needs_verifiers = pytest.mark.skipif(
    "verifiers" not in {found.name for found in distributions()},
    reason="needs the extra: pip install 'brorl[verifiers]'",
)
pytestmark = pytest.mark.usefixtures("in_an_empty_folder", "as_before")
refusal = partial(refused, "init")

SUMS, MIXED = ((Path(__file__).parent / "tasksets" / name).read_text("utf-8") for name in ("sums.txt", "mixed.txt"))
OTHERS = {
    "machine": ("    async def setup(self, trace, runtime):\n        pass\n", "prepares a machine for its tasks"),
    "container": ("    NEEDS_CONTAINER = True\n", "prepares a machine for its tasks"),
    "runs": (
        "    @vf.reward(weight=0.0)\n    async def runs(self, runtime) -> float:\n        return 1.0\n",
        "has the reward runs, which runs on a machine",
    ),
    "heavy": (
        "    @vf.reward\n    async def bonus(self, trace) -> float:\n        return 1.0\n",
        "has rewards of up to 2 together (bonus: 1, right: 0.7, short: 0.2, thought: 0.1)",
    ),
    "tools": (
        "    @classmethod\n    def toolsets(cls, config):\n        return [vf.Toolset(vf.ToolsetConfig())]\n",
        "has tools",
    ),
}


@pytest.fixture
def as_before() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    taskset._taskset.cache_clear()
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("sums", "science")):
            del sys.modules[name]


def with_more(text: str) -> str:
    """Return the package with more in its class of tasks."""
    return SUMS.replace(
        "class SumsTask(vf.Task[SumsData, SumsState]):\n", f"class SumsTask(vf.Task[SumsData, SumsState]):\n{text}\n"
    )


def rows_of(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@needs_verifiers
def test_a_taskset_is_written_and_trained_on() -> None:
    Path("sums_a.py").write_text(SUMS)
    model = save_tiny_model(Path("tiny"), characters="0123456789+-=<>/thinkBberf. \n")
    outcome = command("init", "verifiers:sums-a", f"--model={model}", "--taskset-config={largest: 7, brief: true}")
    assert outcome.code == 0, outcome
    assert "wrote sums-a.jsonl: 49 tasks\n" in outcome.out
    assert rows_of("sums-a")[10]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 3 ="},
    ]
    few = ("--steps=1", "--dynamic_sampling.enabled=false", "--evaluation.num_prompts=0", "--sampling.max_new_tokens=8")
    outcome = command("check", "mine.yaml", "--no-timing")  # the answer of a row is a task, which is no response
    assert outcome.code == 0, outcome
    assert "no reference answer: no response to this question is known to be correct" in outcome.out
    assert "warning" not in outcome.out
    outcome = command("train", "mine.yaml", "--output_dir=run", "--report=false", *few)
    assert outcome.code == 0, outcome
    stored = [row for row in pq.read_table(next(Path("run").rglob("*.parquet"))).to_pylist() if row["finished"]]
    assert len({row["score"] for row in stored}) > 1
    for row in stored:
        right = json.loads(row["reference"])["data"]["right"]
        reward = 0.7 * (row["response"].strip() == str(right)) + 0.2 * (len(row["response"]) < 4)
        assert row["score"] == pytest.approx(reward, abs=1e-9), row


@needs_verifiers
def test_a_taskset_keeps_its_rewards_whatever_its_name_and_its_tasks_contain() -> None:
    """The name is that of a built-in domain, and every task has the mark that ends solutions in GSM8K."""
    Path("science.py").write_text(SUMS.replace('prompt=f"', 'prompt=f"#### '))
    outcome = command("init", "verifiers:science", "--model=quickstart")
    assert outcome.code == 0, outcome
    config = make_config(read_recipe("mine.yaml"), {}, "mine.yaml")
    assert config.verification.functions == {"science": taskset.SCORE}
    assert config.prompt.template == "{prompt}"
    question = build_questions(config)[0].train[0]
    right = json.loads(question.reference)["data"]["right"]
    assert taskset.score(f"<think>.</think>{right}", question.reference) == 1.0


@needs_verifiers
def test_rewards_are_those_of_the_tasks(rng: np.random.Generator) -> None:
    Path("sums_b.py").write_text(SUMS)
    assert command("init", "verifiers:sums-b", "--model=quickstart").code == 0
    rows = rows_of("sums-b")
    assert [row["prompt"] for row in rows] == [f"{a} + {b} =" for a in range(9) for b in range(9)]
    for row in (rows[i] for i in rng.choice(len(rows), 10, replace=False)):
        data = json.loads(str(row["answer"]))["data"]
        a, _, b, _ = str(row["prompt"]).split()
        assert data["right"] == int(a) + int(b)
        for response in (f"{data['right']}", f" {data['right']} ", "99", "long text", "<think>Well.</think>99"):
            thought, _, reply = response.rpartition("</think>")
            expected = 0.7 * (reply.strip() == str(data["right"])) + 0.2 * (len(reply) < 4) + 0.1 * bool(thought)
            assert taskset.score(response, str(row["answer"])) == pytest.approx(expected, abs=1e-9)
        assert taskset.score(f"<think>It is</think>{data['right']}", str(row["answer"])) == 1.0  # and not 0.99...


@needs_verifiers
def test_each_task_is_scored_by_its_own_class_and_settings() -> None:
    Path("sums_mixed.py").write_text(MIXED)
    assert command("init", "verifiers:sums-mixed", "--model=quickstart").code == 0
    taskset._taskset.cache_clear()  # as in a worker
    for number, row in enumerate(rows_of("sums-mixed")):
        a, b, offset = number, number + 3, number % 3
        right = (a * b if number % 2 else a + b) + offset
        scores = {reply: taskset.score(str(reply), str(row["answer"])) for reply in range(a * b + a + b + 4)}
        assert [reply for reply, reward in scores.items() if reward] == [right]


@needs_verifiers
def test_rewards_of_several_numbers_have_no_bound() -> None:
    returned = '{"exact": float(trace.last_reply == str(self.data.right)), "near": 1.0}'
    body = f"    @vf.reward(weight=0.7)\n    async def right(self, trace: vf.Trace)%s:\n        return {returned}\n"
    start, end = SUMS.index("    @vf.reward(weight=0.7)"), SUMS.index("    @vf.reward(weight=0.2)")
    Path("sums_said.py").write_text(SUMS[:start] + body % " -> dict[str, float]" + "\n" + SUMS[end:])
    assert "has the reward right, which returns several numbers" in refusal("verifiers:sums-said")
    Path("sums_unsaid.py").write_text(SUMS[:start] + body % "" + "\n" + SUMS[end:])
    assert command("init", "verifiers:sums-unsaid", "--model=quickstart").code == 0
    row = rows_of("sums-unsaid")[12]
    right = json.loads(str(row["answer"]))["data"]["right"]
    with pytest.raises(ValueError, match=r"add up to 1\.6, .*exact: 0\.7, near: 0\.7"):
        taskset.score(f"{right}", str(row["answer"]))


@needs_verifiers
@pytest.mark.parametrize("name", OTHERS)
def test_tasks_that_one_response_does_not_decide_are_refused(name: str) -> None:
    more, problem = OTHERS[name]
    Path(f"sums_{name}.py").write_text(with_more(more))
    assert f"verifiers:sums-{name} {problem}" in refusal(f"verifiers:sums-{name}")


@needs_verifiers
def test_weights_can_be_lowered_by_the_settings() -> None:
    Path("sums_c.py").write_text(with_more(OTHERS["heavy"][0]))
    lowered = "--taskset-config={task: {rewards: {bonus: {weight: 0}}}}"
    assert command("init", "verifiers:sums-c", "--model=quickstart", lowered).code == 0
    row = rows_of("sums-c")[12]
    right = json.loads(str(row["answer"]))["data"]["right"]
    assert taskset.score(f"<think>.</think>{right}", str(row["answer"])) == 1.0


@needs_verifiers
def test_an_agent_of_its_own_is_refused() -> None:
    own = SUMS.replace('["SumsTaskset"]', '["SumsTaskset", "Pair"]') + "\n\nclass Pair(vf.Env):\n    pass\n"
    Path("sums_d.py").write_text(own)
    assert "has an agent or an environment of its own" in refusal("verifiers:sums-d")


@needs_verifiers
def test_wrong_names_and_settings_are_refused() -> None:
    Path("sums_e.py").write_text(SUMS)
    assert "verifiers:sums-none cannot be read (ModuleNotFoundError: taskset 'sums-none' not found" in refusal(
        "verifiers:sums-none"
    )
    assert "cannot be read (ValidationError" in refusal("verifiers:sums-e", "--taskset-config={biggest: 3}")
    assert "has no tasks" in refusal("verifiers:sums-e", "--taskset-config={largest: 0}")
    assert "must be a mapping" in refusal("verifiers:sums-e", "--taskset-config=3")
    Path("sums-e.jsonl").write_text("precious")
    assert "sums-e.jsonl already exists" in refusal("verifiers:sums-e")


def test_settings_without_a_taskset_are_refused() -> None:
    Path("a.jsonl").write_text('{"prompt": "1 + 1?", "answer": "2"}\n')
    assert "--taskset-config is for tasksets, and a.jsonl is a file" in refusal("a.jsonl", "--taskset-config={a: 1}")


def test_a_missing_extra_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", None)
    assert "run: pip install 'brorl[verifiers]'" in refusal("verifiers:sums")
