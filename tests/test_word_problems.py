"""The word problems, each solved again from its text, and the small model made for them."""

import importlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch

from brorl.model.load import end_tokens, load_model, load_tokenizer
from brorl.rollout.engine import SampleTask
from brorl.rollout.native_engine import NativeEngine
from brorl.sampling import SamplingParams

FOLDER = Path(__file__).parents[1] / "examples" / "word_problems"
ROWS = [json.loads(line) for line in (FOLDER / "problems.jsonl").read_text("utf-8").splitlines()]

N = r"\$?(\d+(?:\.\d)?)"
SOLVERS: dict[str, Callable[..., Fraction]] = {  # what a question asks for, from the numbers in its text
    rf"has {N} \w+ and (?:finds|buys|gets|wins) {N} more\.": lambda a, b: a + b,
    rf"has {N} \w+ and (?:loses|sells|gives away|uses) {N}\. How many \w+ are left": lambda a, b: a - b,
    rf"has {N} \w+\. \w+ has {N}\. How many more": lambda a, b: a - b,
    rf"There are {N} \w+ with {N} \w+ each": lambda a, b: a * b,
    rf"shares {N} \w+ fairly among {N} friends": lambda a, b: a / b,
    rf"has {N} \w+, buys {N} more and then sells {N}\.": lambda a, b, c: a + b - c,
    rf"has {N} \w+ of {N} \w+ and {N} loose": lambda a, b, c: a * b + c,
    rf"has {N} \w+\. \w+ has {N} more than \w+\. How many do they have together": lambda a, b: 2 * a + b,
    rf"buys {N} \w+ at {N} each and pays with {N}\. How many dollars come back": lambda n, price, paid: (
        paid - n * price
    ),
    rf"split {N} evenly": lambda a: a / 2,
    rf"gives away {N} of {N} \w+\. What fraction of the \w+ is left": lambda part, whole: 1 - part / whole,
}


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "make_model", raising=False)  # of another example
    return importlib.import_module("make_problems")


@pytest.fixture
def maker(problems: ModuleType) -> ModuleType:
    assert problems.__file__ == str(FOLDER / "make_problems.py")
    return importlib.import_module("make_model")


def solve(question: str) -> tuple[str, Fraction]:
    """Return the one kind that the question is of, and its answer."""
    found = [(kind, re.search(kind, question), solver) for kind, solver in SOLVERS.items()]
    ((kind, match, solver),) = [entry for entry in found if entry[1]]
    return kind, solver(*(Fraction(number) for number in match.groups()))


def test_every_answer_is_right() -> None:
    kinds: Counter[str] = Counter()
    for row in ROWS:
        kind, value = solve(row["question"])
        kinds[kind] += 1
        reasoning, _, answer = row["answer"].partition("\n#### ")
        assert Fraction(answer) == value, row
        assert re.fullmatch(rf"[\d./ *+-]+ = {re.escape(answer)}", reasoning), row
        assert re.fullmatch(r"\d+|\d+\.5|\d/\d+", answer), row
        assert 0 < value <= 30
    assert set(kinds) == set(SOLVERS)
    assert min(kinds.values()) >= 10


def test_the_file_is_what_its_script_writes(
    problems: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "again.jsonl"
    monkeypatch.setattr("sys.argv", ["make_problems.py", "--out", str(out)])
    problems.main()
    committed = (FOLDER / "problems.jsonl").read_bytes()
    assert out.read_bytes() == committed
    assert len(committed) < 100_000
    assert len({row["question"] for row in ROWS}) == len(ROWS) == 300
    assert all(set(row) == {"question", "answer"} for row in ROWS)


def test_training_never_sees_the_committed_questions(maker: ModuleType) -> None:
    fresh = [p.question for p in islice(maker.fresh_problems(1), 15_000)]
    assert len(set(fresh)) == len(fresh)
    assert not {row["question"] for row in ROWS} & set(fresh)


def test_untrained_model_loads_chats_and_samples(
    maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["make_model.py", str(tmp_path), "--random"])
    maker.main()
    tokenizer = load_tokenizer(str(tmp_path))
    model = load_model(str(tmp_path), torch.device("cpu"), torch.float32)
    assert 300_000 < model.num_parameters() < 1_000_000

    question = ROWS[0]["question"]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == f"<|system|>Be brief.<|user|>{question}<|assistant|>"
    answered = [*messages, {"role": "assistant", "content": "\\boxed{43}"}]
    assert tokenizer.apply_chat_template(answered, tokenize=False) == f"{text}\\boxed{{43}}<|end|>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) < 60
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(tokenizer("Ünïcode {x}\n 42 ☃")["input_ids"]) == "Ünïcode {x}\n 42 ☃"

    (stop,) = end_tokens(model, tokenizer)
    assert tokenizer.decode([stop]) == "<|end|>"
    tree = NativeEngine(model, stop).sample(SampleTask([ids], 8, SamplingParams(max_new_tokens=12), seed=0))[0]
    assert tree.num_rollouts == 8


def test_the_loss_is_that_of_the_response_alone(maker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch's loss, against log-probs of each response from rows of its own."""
    monkeypatch.setattr(maker, "BATCH", 8)
    problems = list(islice(maker.fresh_problems(2), maker.BATCH))
    tokenizer = maker.make_tokenizer(problems)
    model = maker.make_model(tokenizer, seed=3)
    total, count = 0.0, 0
    for problem in problems:
        text = f"<|user|>{problem.question}<|assistant|>"
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        answer = tokenizer(f"{problem.reasoning}, so \\boxed{{{problem.answer}}}<|end|>")["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        logprob = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        total -= float(logprob.gather(1, torch.tensor(answer)[:, None]).sum())
        count += len(answer)
    (loss,) = maker.train(model, tokenizer, problems, seconds=1e9)
    assert loss == pytest.approx(total / count, rel=1e-4)
