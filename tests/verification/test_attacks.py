"""The attack suite: at every level, as every user, no attack does harm, and nothing is left running."""

import os
from collections import Counter
from typing import Any

import numpy as np
import pytest
from attacks.catalog import ALL, CATEGORIES
from attacks.hoards import HOARDS
from attacks.running import can_be_another_user, can_limit_memory, run_campaign, run_hoards

pytestmark = pytest.mark.linux


def part(rng: np.random.Generator, size: int) -> list[str]:
    """Return the arguments for one of `size` parts, which BRORL_TEST_SEED draws; with BRORL_ALL_ATTACKS=1 for all."""
    size = 1 if os.environ.get("BRORL_ALL_ATTACKS") == "1" else size
    return ["--part", str(size), "--seed", str(rng.integers(size))]


def assert_contained(report: dict[str, Any], at_least: int) -> None:
    assert len(report["harm"]) >= at_least
    assert {name: harms for name, harms in report["harm"].items() if harms} == {}
    assert report["strangers"] == []


def test_attacks_have_names_of_their_own() -> None:
    assert [name for name, count in Counter(attack.name for attack in ALL).items() if count > 1] == []
    assert len(ALL) >= 80


@pytest.mark.slow
@pytest.mark.parametrize(("level", "size"), [("landlock", 8), ("seccomp", 8)])
def test_the_sandbox_contains_attacks(level: str, size: int, rng: np.random.Generator) -> None:
    assert_contained(run_campaign([level, *(arguments := part(rng, size))]), len(ALL) // int(arguments[1]))


@pytest.mark.slow
@pytest.mark.parametrize("level", ["landlock", "seccomp"])
def test_the_sandbox_contains_attacks_on_an_ordinary_user(level: str, rng: np.random.Generator) -> None:
    if not can_be_another_user():
        pytest.skip("only root with mount namespaces can become another user")
    arguments = part(rng, 8)
    assert_contained(run_campaign([level, *arguments], as_other_user=True), len(ALL) // int(arguments[1]))


@pytest.mark.slow
def test_attacks_bite_where_nothing_confines_them() -> None:
    """Checks that the canaries notice: a suite whose oracles cannot fail would prove nothing."""
    biting = {attack.name for attack in ALL if attack.bites}
    report = run_campaign(["unsafe", "--bites"])
    harm = report["harm"]
    assert set(harm) == biting
    assert {name for name, harms in harm.items() if not harms} == set()
    assert len(biting) >= 60
    assert len([name for name, attacks in CATEGORIES.items() if any(a.bites for a in attacks)]) >= 6


HELD_MIB = 128  # by a program whose limit is 256 MiB; most hold 20, tables of pages more until they are counted


@pytest.mark.slow
@pytest.mark.skipif(not can_limit_memory(), reason="this process cannot make a cgroup")
@pytest.mark.parametrize("level", ["landlock", "seccomp"])
def test_the_kernel_holds_little_memory_for_a_program(level: str) -> None:
    report = run_hoards([level])
    assert set(report) == set(HOARDS)
    assert {name: outcome for name, outcome in report.items() if outcome["held_mib"] > HELD_MIB} == {}


@pytest.mark.slow
@pytest.mark.skipif(not can_limit_memory(), reason="this process cannot make a cgroup")
def test_honest_programs_beside_hoards_are_correct(rng: np.random.Generator) -> None:
    """In a cgroup of 900 MiB, where two programs at their limit have room."""
    names = rng.choice([*HOARDS], size=2, replace=False)
    report = run_hoards(["landlock", *map(str, names), "--cgroup", "900"])
    assert {name: outcome["honest"] for name, outcome in report.items()} == {
        str(name): {"correct": 8} for name in names
    }
