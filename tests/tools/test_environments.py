"""Environments: their state after any branch of calls, against objects that are played in this process."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from transformers.utils import get_json_schema

from brorl.algorithms.settings import RewardShaping
from brorl.errors import UserError
from brorl.prompts.file_questions import read_source
from brorl.prompts.prompt import Prompt
from brorl.prompts.settings import FileSource
from brorl.prompts.source_questions import split_held_out
from brorl.tools.calls import Call, Failure, ToolResult, Turn
from brorl.tools.environments import EnvironmentVerifier, calls_text
from brorl.tools.functions import ToolRunner
from brorl.tools.settings import ToolSettings
from brorl.tools.setup import environment_verifier
from brorl.verification.domains.verifiers import make_verifiers
from brorl.verification.sandbox.pool import Workers
from brorl.verification.settings import VerificationSettings

GAMES = '''
import json, os, random, threading, time

LOG = os.path.join(os.path.dirname(__file__), "log")

class Pile:
    """A number to reach; `made` is all that was called, in order."""

    def __init__(self):
        self.made = []
        with open(LOG, "a") as file:
            file.write("new\\n")

    def reset(self, target, prompt, **_columns):
        self.target, self.value, self.coin = target, 0, random.random()
        return f"Reach {target}." if target else None

    def add(self, number: int) -> str:
        """Add to the pile.

        Args:
            number: How much.
        """
        self.made.append(number)
        self.value += number
        if number == 13:
            raise ValueError("thirteen")
        return f"{self.value} after {self.made}"

    async def double(self) -> int:
        """Double the pile."""
        self.made.append("x2")
        self.value *= 2
        return self.value

    def toss(self) -> float:
        """Toss a coin, of the state of the process."""
        self.made.append("toss")
        return [self.coin, random.random()]

    def wait(self, seconds: float) -> None:
        """Wait.

        Args:
            seconds: How long.
        """
        self.made.append("wait")
        time.sleep(seconds)

    def get_reward(self):
        if "toss" in self.made:
            return random.random()
        if self.value < 0:
            return "low"
        return min(1.0, self.value / self.target)

    def _hidden(self):
        """No tool."""

class Locked(Pile):
    """An object that cannot be copied, so that its calls are played again."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

class Silent:
    def reset(self, **_columns):
        """Say nothing."""

    def look(self) -> str:
        """Look."""
        return "nothing"

class Idle:
    def reset(self):
        pass

class Endless:
    def look(self) -> str:
        """Look."""

class Unknown(Silent):
    def take(self, what):
        """Take.

        Args:
            what: What.
        """

class Failing(Silent):
    def __init__(self):
        raise RuntimeError("no server")

class Numbered(Silent):
    def reset(self, **_columns):
        return 3
'''


def call(name: str, /, **arguments: Any) -> Call:
    return Call(name, json.dumps(arguments, sort_keys=True, separators=(",", ":")))


def row(target: int, **columns: Any) -> str:
    return json.dumps({"prompt": "Play.", "target": target, **columns})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("games")
    (path / "games.py").write_text(GAMES)
    return path


@pytest.fixture(scope="module")
def games(folder: Path) -> Any:
    """The module, in this process."""
    spec = importlib.util.spec_from_file_location("games_of_test", folder / "games.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pile(folder: Path, workers: Workers) -> ToolRunner:
    return load(folder, workers, "Pile")


@pytest.fixture(scope="module")
def locked(folder: Path, workers: Workers) -> ToolRunner:
    return load(folder, workers, "Locked")


def load(folder: Path, workers: Workers, name: str) -> ToolRunner:
    settings = ToolSettings(environment=f"{folder / 'games.py'}:{name}", calculator=True)
    return ToolRunner.from_settings(settings, workers)


def played(game: Any, *calls: Call) -> list[str]:
    """Play calls on an object of this process, and return the texts."""
    texts = []
    for made in calls:
        arguments = json.loads(made.arguments)
        if made.name == "double":
            game.made.append("x2")
            game.value *= 2
            texts.append(str(game.value))
            continue
        try:
            texts.append(game.add(**arguments))
        except ValueError as error:
            texts.append(f"error: ValueError: {error}")
    return texts


@pytest.mark.usefixtures("locked")  # it is loaded while a worker still has transformers
def test_methods_are_the_tools(pile: ToolRunner, games: Any) -> None:
    assert [*pile.tools] == ["calculator", "add", "double", "toss", "wait"]
    game = games.Pile()
    assert [*pile.schemas[1:]] == [get_json_schema(getattr(game, name)) for name in ("add", "double", "toss", "wait")]
    assert pile.observations([row(9), row(0), row(9)]) == ["Reach 9.", "", "Reach 9."]


def test_what_does_not_go_together_is_refused(folder: Path, workers: Workers) -> None:
    silent = load(folder, workers, "Silent")
    assert silent.observations([row(1)]) == [""]
    with pytest.raises(UserError, match="environment has no reward; set"):
        environment_verifier(silent)()
    alone = ToolRunner.from_settings(ToolSettings(calculator=True), workers)
    assert alone.observations(["42"]) == [""]
    with pytest.raises(UserError, match="environment is not set; set"):
        environment_verifier(alone)()
    for name, text, said in (
        ("Numbered", row(1), "TypeError: reset returned int, not text or None"),
        ("Pile", "42", "TypeError: the reference answer is not a row; fix reset or the row; .*domain: environment"),
        ("Pile", '{"target": 1}', "TypeError: Pile.reset.. missing 1 required positional argument: 'prompt'"),
    ):
        with pytest.raises(UserError, match=said):
            load(folder, workers, name).observations([text])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Idle", "it has no method that is a tool; an environment needs reset"),
        ("Endless", "it has no method reset; an environment needs reset"),
        ("Unknown", "take: TypeHintParsingException: Argument what is missing a type hint"),
        ("Failing", "RuntimeError: no server"),
        ("Absent", "cannot load .*has no attribute 'Absent'"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(folder: Path, workers: Workers, name: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"tools\.environment: .*{said}"):
        load(folder, workers, name)


@pytest.mark.parametrize("name", ["Pile", "Locked"])
def test_every_branch_has_its_own_state(
    pile: ToolRunner, locked: ToolRunner, games: Any, rng: np.random.Generator, name: str
) -> None:
    """Transcripts fork at random, and each call may be made by another worker than the one before."""
    tools = pile if name == "Pile" else locked
    transcripts: list[tuple[Call, ...]] = [()]
    for _ in range(4):
        turns: list[Turn] = []
        for transcript in transcripts:
            for _ in range(int(rng.integers(1, 4))):
                made = [call("add", number=int(rng.choice([1, 2, 13]))), call("double"), call("add", number="3"),
                        call("calculator", expression="1+1"), call("jump"), Call("", "", "no JSON")]  # fmt: skip
                chosen = tuple(made[index] for index in rng.integers(len(made), size=rng.integers(1, 4)))
                turns.append(Turn(chosen, int(rng.integers(1, 9)), transcript, row(5)))
        for turn, ((results, count),) in zip(turns, tools.run(turns), strict=True):
            assert count == turn.count
            game = games.Pile()
            game.reset(**json.loads(row(5)))
            steps = [step for step in (*turn.history, *turn.calls) if step.name in ("add", "double")
                     and step.arguments != '{"number":"3"}']  # fmt: skip
            texts = played(game, *steps)
            given = [result.text for step, result in zip(turn.calls, results, strict=True) if step in steps]
            assert given == texts[len(texts) - len(given) :]
        order = rng.permutation(len(turns))
        transcripts = [(*turns[index].history, *turns[index].calls) for index in order[:12]]


def test_equal_transcripts_run_once_and_are_seldom_replayed(folder: Path, pile: ToolRunner) -> None:
    before = pile.num_run
    (folder / "log").write_text("")
    history: tuple[Call, ...] = ()
    for number in range(10):
        turn = Turn((call("add", number=number),), 7, history, row(11))
        outcomes = pile.run([turn] * 5)
        assert outcomes == [[((ToolResult(f"{sum(range(number + 1))} after {[*range(number + 1)]}"),), 7)]] * 5
        history = (*history, *turn.calls)
    assert pile.num_run == before + 10
    assert (folder / "log").read_text().count("new") <= 2  # one per worker; each call on its own would need 10


def test_a_draw_is_the_same_in_a_copy_and_in_a_replay(workers: Workers, pile: ToolRunner, locked: ToolRunner) -> None:
    texts: list[list[str]] = []
    for tools in (pile, locked, pile):
        turns = [Turn((call("toss"),), 1, (call("toss"),) * number, row(3, game=0)) for number in range(4)]
        texts.append([outcome[0][0][0].text for outcome in tools.run(turns)])
        workers.functions.close()
    assert texts[0] == texts[1] == texts[2]
    assert len({*texts[0]}) == 4
    coins = [json.loads(text)[0] for text in texts[0]]
    assert len({*coins}) == 1


def prompt(target: int) -> Prompt:
    return Prompt("p", "Play.", (0,), row(target), "environment", "games", "Play.")


def test_the_reward_is_that_of_a_fresh_object_after_the_calls(
    workers: Workers, games: Any, pile: ToolRunner, rng: np.random.Generator
) -> None:
    settings = VerificationSettings(), RewardShaping()
    verifiers = make_verifiers(["environment"], *settings, workers, environment_verifier(pile))
    items, expected = [], []
    for target in rng.integers(1, 12, 40):
        game = games.Pile()
        game.reset(**json.loads(row(int(target))))
        calls = [call("add", number=int(n)) for n in rng.choice([0, 1, 2, 13], 3)] + [call("double")] * int(
            rng.integers(2)
        )
        played(game, *calls)
        noise = [Call("", "", "no JSON"), call("jump"), call("add", number="1"), call("calculator", expression="1")]
        mixed = [text for made in calls for text in (noise[rng.integers(4)], made)]
        items.append((prompt(int(target)), calls_text(mixed)))
        expected.append(game.get_reward())
    verdicts = verifiers["environment"].verify_all(items)
    assert [verdict.score for verdict in verdicts] == expected
    assert [verdict.correct for verdict in verdicts] == [reward >= 1 for reward in expected]
    assert 0 < sum(verdict.correct for verdict in verdicts) < 40


def test_texts_that_are_no_calls_and_rewards_that_are_no_numbers(pile: ToolRunner) -> None:
    verifier = EnvironmentVerifier(pile)
    texts = ["42", "", "[1]", '{"a": 1}', '[["a"]]', "[" * 100_000, "null"]
    reasons = [verdict.reason for verdict in verifier.verify_all([(prompt(4), text) for text in texts])]
    assert reasons == ["no answer"] * 7
    low, zero, tossed = (
        verifier.verify_all([(prompt(4), calls_text(calls))])[0]
        for calls in ([call("add", number=-1)], [], [call("toss")])
    )
    assert low.reason == "verifier returned str, not a bool, a number from 0 to 1 or a dict"
    assert (zero.correct, zero.score, zero.reason) == (False, 0.0, "wrong answer")
    assert verifier.verify_all([(prompt(4), calls_text([call("toss")]))])[0].score == tossed.score > 0
    broken = verifier.verify_all([(prompt(0), "[]")])[0]
    assert broken.reason == "verifier raised ZeroDivisionError: division by zero"
    assert verifier.check_references([row(1), "42", "{"]) == dict.fromkeys(
        ["42", "{"], "is not a row as JSON, which an environment needs for its reset"
    )


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_of_an_environment_are_whole_references(tmp_path: Path, suffix: str) -> None:
    rows = [{"question": "Play.", "target": number // 2, "more": {"a": [number // 2]}} for number in range(60)]
    file = tmp_path / f"games.{suffix}"
    if suffix == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), file)
    source = FileSource(path=str(file), prompt_column="question", domain="environment")
    reading = read_source(source)
    assert [json.loads(question.reference) for question in reading.questions] == rows[::2]
    assert (reading.num_rows, reading.num_repeated) == (60, 30)
    assert {question.text for question in reading.questions} == {"Play."}
    parts = split_held_out(reading.questions, 0.5, 0)  # the same text does not put all on one side
    assert min(map(len, parts)) > 5


def test_failures_of_an_environment(workers: Workers, pile: ToolRunner) -> None:
    settings = ToolSettings(environment=pile.environment, timeout_s=0.4)
    tools = ToolRunner(pile.tools, settings, workers)
    turns = [
        Turn((call("add", number=13),), row=row(1)), Turn((call("wait", seconds=60),), row=row(1)),
        Turn((call("add", number=1),), 1, (call("wait", seconds=60),), row(1)),
        Turn((call("add", number=1),), row="{}"), Turn((call("double"),), row=row(1)),
    ]  # fmt: skip
    results = [outcome[0][0][0] for outcome in tools.run(turns)]
    assert results[:3] == [
        ToolResult("error: ValueError: thirteen", Failure.RAISED),
        ToolResult("error: timeout after 0.4 s", Failure.TIMEOUT),
        ToolResult("error: timeout after 0.8 s", Failure.TIMEOUT),
    ]
    assert results[3].text.startswith("error: TypeError: Pile.reset() missing")
    assert results[4] == ToolResult("0")
