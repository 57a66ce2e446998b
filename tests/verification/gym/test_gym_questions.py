"""Questions of Reasoning Gym: the same in every process, distinct, held out, and checked before they are made."""

import random
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from brorl.config.reading import make_config
from brorl.errors import UserError
from brorl.evaluation.questions import build_questions
from brorl.prompts.settings import GymSource
from brorl.verification.gym import task
from brorl.verification.gym.task import BENCHMARKS, GymTask, read_gym
from brorl.verification.sandbox.pool import VerifierCall, WorkerPool
from run_support import command, save_tiny_model

WORKER = Path(task.__file__).with_name("entries.py")

needs_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs the extra: pip install 'brorl[gym]'")
pytestmark = pytest.mark.linux


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1, timeout_s=300.0, memory_bytes=4 << 30) as made:
        yield made


def source(**settings: Any) -> GymSource:
    (made,) = make_config({"data.sources": settings}, {}, "test").data.sources
    assert isinstance(made, GymSource)
    return made


def test_a_source_is_named_after_its_data_set() -> None:
    assert source(gym="maze").label == "maze"
    assert source(gym=["maze", "gcd"]).label == source(gym="all").label == source(gym="prorl").label == "gym"
    assert source(gym="maze", name="paths").label == "paths"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"gym": "maze", "num_question": 3}, "num_question is not a setting; did you mean num_questions"),
        ({"gym": "maze", "num_questions": 0}, "greater than or equal to 1"),
        ({"gym": "maze", "name": "a:b"}, "must not contain a colon"),
        ({"gym": []}, "at least 1 item"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        source(**settings)


def test_a_missing_extra_is_an_error_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brorl.verification.gym.task.find_spec", lambda _name: None)
    with pytest.raises(UserError, match=r"pip install 'brorl\[gym\]'"):
        read_gym(source(gym="maze"), 1)


def test_settings_of_several_data_sets_are_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "require_reasoning_gym", lambda: None)
    with pytest.raises(UserError, match="the keys must be their names, got min_animals: 3"):
        read_gym(source(gym=["maze", "leg_counting"], config={"min_animals": 3}), 1)


@needs_gym
@pytest.mark.slow
def test_the_sets_and_the_benchmarks_can_be_generated(pool: WorkerPool) -> None:
    """`prorl` has the 96 datasets of the paper: all that the library has but the held-out ones and later ones."""
    sources = [source(gym="prorl"), *BENCHMARKS.values()]
    results = pool.run([VerifierCall(f"{WORKER}:check_source", (gym_source.gym, {})) for gym_source in sources])
    name_lists = [result.value for result in results]
    assert [type(names) for names in name_lists] == [list, list, list], name_lists
    prorl, every, held_out = map(set, name_lists)
    assert len(name_lists[0]) == len(prorl) == 96
    assert prorl < every
    assert held_out == {"acre", "boxnet", "game_of_life_halting"}
    later = {"coin_flip", "kakurasu", "modulo_grid", "path_star", "puzzle24", "survo"}
    assert every - prorl - held_out <= later or len(every) > 105  # a later version has more


@needs_gym
@pytest.mark.slow
def test_every_default_is_a_setting_of_its_type(pool: WorkerPool) -> None:
    """The defaults that a recipe can hold are accepted: the check of the types rejects no setting that works."""
    (result,) = pool.run([VerifierCall(f"{Path(__file__).with_name('gym_defaults.py')}:rejected", ())])
    rejected, checked = result.value
    assert rejected == []
    assert checked > 400


@needs_gym
@pytest.mark.slow
def test_an_error_names_its_source() -> None:
    recipe = {
        "data.sources": [{"gym": "gcd", "num_questions": 3}, {"gym": "mazz"}],
        "evaluation.sources": {"gym": "gcd", "config": {"min_number": 1}},
        "data.held_out_fraction": 0.0,
        "verification.workers": 1,
    }
    with pytest.raises(UserError, match=r"^data.sources\[1\].gym: 'mazz' is .* did you mean maze"):
        build_questions(make_config(recipe, {}, "test"))
    recipe["data.sources"] = {"gym": "gcd", "num_questions": 3}
    with pytest.raises(UserError, match=r"^evaluation.sources\[0\].config: gcd has no setting 'min_number' .*min_num"):
        build_questions(make_config(recipe, {}, "test"))


@needs_gym
@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "configs", "problem"),
    [
        (["leg_countin"], {}, "gym: 'leg_countin' is not a Reasoning Gym dataset; did you mean leg_counting"),
        (["xylophones"], {}, "gym: 'xylophones' is not .*; docs/reference/gym.md lists the 105 names"),
        (["maze", "gcd"], {"mase": {}}, "'mase' is not one of this source's datasets; did you mean maze"),
        (["maze"], {"maze": {"min_dits": 3}}, "config: maze has no setting 'min_dits' .*did you mean min_dist"),
        (["maze"], {"maze": {"size": 3}}, "maze has no setting 'size' .settings: min_dist, .*; docs/reference/gym.md"),
        (["maze"], {"maze": {"min_dist": 30, "max_dist": 2}}, "maze rejects config"),
        (["maze"], {"maze": {"min_dist": "x"}}, "min_dist: 'x', which must be of type int; docs/reference/gym"),
        (["maze"], {"maze": {"min_dist": True}}, "min_dist: True, which must be of type int"),
        (["maze"], {"maze": {"min_dist": 2.5}}, "min_dist: 2.5, which must be of type int"),
        (["maze"], {"maze": {"min_dist": None}}, "min_dist: None, which must be of type int"),
        (["aiw"], {"aiw": {"male_names": ["Bob", 1]}}, "'Bob', 1., which must be of type list.str."),
        (["time_intervals"], {"time_intervals": {"min_time": "10:00"}}, "must be of type datetime.time"),
        (["chain_sum"], {"chain_sum": {"allow_negation": 1}}, "must be of type bool"),
        (["basic_arithmetic"], {"basic_arithmetic": {"whitespace": "two"}}, "of type Literal.'no_space', 'single'"),
    ],
)
def test_names_and_settings_are_checked_first(
    pool: WorkerPool, given: list[str], configs: dict[str, Any], problem: str
) -> None:
    (result,) = pool.run([VerifierCall(f"{WORKER}:check_source", (given, configs))])
    assert isinstance(result.value, str)
    assert re.search(problem, result.value)


@needs_gym
@pytest.mark.slow
def test_an_index_beyond_the_end_of_a_dataset_is_an_error() -> None:
    with pytest.raises(UserError, match=r"acre cannot generate question 20000 .*change first_index"):
        read_gym(source(gym="acre", first_index=19_990, num_questions=20), 1)


# Two use the global random state, three depend on the order of sets, one on its number of entries.
DELICATE = ("list_functions", "codeio", "isomorphic_strings", "ransom_note", "polynomial_multiplication", "acre")


@needs_gym
@pytest.mark.slow
def test_an_entry_is_the_same_whatever_was_made_before(pool: WorkerPool, rng: np.random.Generator) -> None:
    """A worker that has made other entries against new ones, at the index 13, which uses the global random state."""
    before = [(name, int(index)) for name in DELICATE for index in rng.integers(0, 14, size=4)]
    asked = [(name, 13) for name in DELICATE]
    with WorkerPool(1, timeout_s=300.0, memory_bytes=4 << 30) as fresh:
        (mixed,) = pool.run([VerifierCall(f"{WORKER}:generate", ([*before, *asked], {}, 0))])
        (alone,) = fresh.run([VerifierCall(f"{WORKER}:generate", (asked[::-1], {}, 0))])
    here, there = ([task for _, task, _ in rows] for rows in (mixed.value[-len(asked) :], alone.value[::-1]))
    assert here == there
    assert all(here)


@needs_gym
@pytest.mark.slow
def test_questions_take_turns_are_distinct_and_held_out() -> None:
    """Through the whole assembly: two datasets, one that repeats itself, and an overlapping source to evaluate on."""
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    recipe = {
        "data.sources": {"gym": ["leg_counting", "tower_of_hanoi"], "num_questions": 60, "name": "both"},
        "data.held_out_fraction": 0.25,
        "evaluation.sources": {"gym": "leg_counting", "first_index": 25, "num_questions": 10},
        "verification.workers": 1,
    }
    both, legs = build_questions(make_config(recipe, {}, "test"))
    tasks = [[GymTask.from_text(q.reference) for q in part] for part in (both.train, both.held_out)]
    train, held_out = ({(task.data_set, task.index) for task in part} for part in tasks)
    assert train.isdisjoint(held_out)
    assert {index for _, index in train | held_out} <= set(range(30))
    texts = [question.words for question in (*both.train, *both.held_out)]
    assert len(set(texts)) == len(texts)
    assert {q.words for q in both.train}.isdisjoint(q.words for q in legs.held_out)
    assert both.num_repeated > 0
    assert 60 == both.num_rows == both.num_repeated + len(both.train) + both.num_evaluated_on + both.num_held_out
    assert sorted(question.id for question in legs.held_out) == sorted(f"leg_counting:{i}" for i in range(25, 35))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002
    assert "reasoning_gym" not in sys.modules


@needs_gym
@pytest.mark.slow
def test_check_shows_questions_and_tries_the_verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    model = save_tiny_model(tmp_path / "tiny", characters="".join(map(chr, range(32, 127))) + "\n", max_positions=1024)
    outcome = command(
        "check", "--data.sources={gym: gcd, num_questions: 30}", "--data.held_out_fraction=0.3", "--no-timing",
        "--sampling.max_new_tokens=8", "--verification.workers=1", f"--model={model}",
    )  # fmt: skip
    assert (outcome.code, outcome.err) == (0, ""), outcome
    assert "Greatest Common Divisor" in outcome.out
    assert re.search(r"<answer>\d+</answer>.*correct", outcome.out)
