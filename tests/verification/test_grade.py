"""Grading: verdicts aligned with leaves, one call of the verifier per distinct text, also from several threads."""

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brorl.algorithms.settings import RewardShaping
from brorl.errors import BrokenVerifierError
from brorl.prompts.countdown import CountdownPuzzle
from brorl.prompts.prompt import Prompt
from brorl.tree import RolloutTree
from brorl.verdict import UNVERIFIED, Verdict, is_failure, is_unverified, unverified_verdict, verdict_of
from brorl.verification.domains.countdown import CountdownVerifier
from brorl.verification.grade import Grader, grade, has_format, seen_text
from brorl.verification.settings import Sees
from each_row import each_row

EOS = 0


def seen(decode: Callable[[Sequence[int]], str]) -> partial[str]:
    """What verifiers see of responses of one turn."""
    return partial(seen_text, decode=decode)


def decode(tokens: tuple[int, ...]) -> str:
    return "".join(chr(token) for token in tokens if token != EOS)


def prompt_named(name: str, domain: str = "even") -> Prompt:
    return Prompt(name, name, tuple(name.encode()), name, domain)


class EvenLength:
    """Correct when the text has an even number of characters; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, str]] = Counter()

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        return [self.verify(prompt, response) for prompt, response in items]

    def verify(self, prompt: Prompt, response: str) -> Verdict:
        self.asked[prompt.id, response] += 1
        even = len(response) % 2 == 0
        return Verdict(even, float(even), response, "even" if even else "odd", 0.0)


responses_lists = st.lists(st.tuples(st.lists(st.integers(97, 99), max_size=4), st.booleans()), min_size=1, max_size=30)


@given(st.lists(responses_lists, min_size=1, max_size=3))
def test_every_leaf_gets_the_verdict_of_its_own_text(
    rollouts: list[list[tuple[list[int], bool]]],
) -> None:
    prompts = [prompt_named(f"prompt {i}") for i in range(len(rollouts))]
    sequences = [[(*tokens, EOS) if done else (*tokens, 97) for tokens, done in group] for group in rollouts]
    trees = [
        RolloutTree.from_responses(prompt.token_ids, group, finished=[tokens[-1] == EOS for tokens in group])
        for prompt, group in zip(prompts, sequences, strict=True)
    ]
    verifier = EvenLength()
    graded = grade(prompts, trees, {"even": verifier}, seen(decode))

    assert len(graded) == len(trees)
    for group, tree, verdicts in zip(sequences, trees, graded, strict=True):
        assert len(verdicts) == tree.num_responses
        # Weighted with the counts, the verdicts are those of grading every rollout by itself.
        tree_outcomes: Counter[str] = Counter()
        for verdict, count in zip(verdicts, tree.leaf_count.tolist(), strict=True):
            tree_outcomes[f"{verdict.extracted} {verdict.reason}"] += count
        flat_outcomes = Counter(
            "None truncated"
            if tokens[-1] != EOS
            else f"{decode(tokens)} {'even' if len(decode(tokens)) % 2 == 0 else 'odd'}"
            for tokens in group
        )
        assert tree_outcomes == flat_outcomes
        for leaf, verdict in zip(tree.leaf.tolist(), verdicts, strict=True):
            path: list[int] = []
            node = leaf
            while node >= 0:
                path.append(int(tree.token[node]))
                node = int(tree.parent[node])
            assert verdict.extracted in (None, decode(tuple(reversed(path))))
    assert all(times == 1 for times in verifier.asked.values())


def test_a_text_is_verified_once_however_it_is_spelled() -> None:
    """Tokens 1 and 2 are two spellings of the same letter."""
    prompt, verifier = prompt_named("p"), EvenLength()
    tree = RolloutTree.from_responses(prompt.token_ids, [(1, EOS), (2, EOS), (1, EOS), (1, 2, EOS)])
    (verdicts,) = grade([prompt], [tree], {"even": verifier}, seen(lambda t: "x" * (len(t) - 1)))
    assert verifier.asked == {("p", "x"): 1, ("p", "xx"): 1}
    assert [v.extracted for v in verdicts] == ["x", "xx", "x"]


def test_truncated_responses_are_incorrect_unless_accepted() -> None:
    puzzle = CountdownPuzzle((3, 5), 8)
    prompt = Prompt("p", puzzle.text, tuple(puzzle.text.encode()), puzzle.reference, "countdown")
    tree = RolloutTree.from_responses(prompt.token_ids, [tuple(b"3+5"), (*b"5+3", EOS)], finished=[False, True])
    verifiers = {"countdown": CountdownVerifier()}
    (strict,) = grade([prompt], [tree], verifiers, seen(decode))
    assert [(v.correct, v.score, v.reason) for v in strict] == [
        (False, 0.0, "truncated"),
        (True, 1.0, "correct"),
    ]
    (lenient,) = grade([prompt], [tree], verifiers, seen(decode), accept_truncated=True)
    assert [v.reason for v in lenient] == ["correct", "correct"]


def test_a_domain_is_asked_once_about_all_trees() -> None:
    """And never twice about one text of one prompt, even where the prompt has several trees."""

    class Recorder(EvenLength):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[list[tuple[str, str]]] = []

        def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
            self.calls.append([(prompt.id, text) for prompt, text in items])
            return super().verify_all(items)

    prompts = [prompt_named("a"), prompt_named("b"), prompt_named("c", "other"), prompt_named("a"), prompt_named("d")]
    responses = [[(97, EOS), (98, EOS)], [(97, EOS)], [(99, EOS)], [(98, EOS), (98, 98, EOS)], [(97, 97)]]
    finished = [[tokens[-1] == EOS for tokens in group] for group in responses]
    trees = [
        RolloutTree.from_responses(prompt.token_ids, group, finished=done)
        for prompt, group, done in zip(prompts, responses, finished, strict=True)
    ]
    even, other, unused = Recorder(), Recorder(), Recorder()
    graded = grade(prompts, trees, {"even": even, "other": other, "unused": unused}, seen(decode))
    assert even.calls == [[("a", "a"), ("a", "b"), ("b", "a"), ("a", "bb")]]
    assert other.calls == [[("c", "c")]]
    assert unused.calls == []
    assert [[v.extracted for v in verdicts] for verdicts in graded] == [["a", "b"], ["a"], ["c"], ["b", "bb"], [None]]
    assert grade(prompts[4:], trees[4:], {"even": unused}, seen(decode))[0][0].reason == "truncated"
    assert unused.calls == []  # nothing to ask


def test_a_verifier_that_forgets_a_verdict_is_found() -> None:
    class Forgetful(EvenLength):
        def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
            return super().verify_all(items)[1:]

    tree = RolloutTree.from_responses(prompt_named("p").token_ids, [(97, EOS), (98, EOS)])
    with pytest.raises(ValueError, match="shorter"):
        grade([prompt_named("p")], [tree], {"even": Forgetful()}, seen(decode))


def test_mistakes_of_the_caller_are_named() -> None:
    tree = RolloutTree.from_responses(prompt_named("p").token_ids, [(97, EOS)])
    with pytest.raises(ValueError, match="longer"):
        grade([prompt_named("p")], [tree, tree], {"even": EvenLength()}, seen(decode))
    with pytest.raises(ValueError, match="same order"):
        grade([prompt_named("q")], [tree], {"even": EvenLength()}, seen(decode))


@pytest.mark.parametrize(("score", "seconds"), [(float("nan"), 0.0), (float("inf"), 0.0), (1.0, -1.0)])
def test_a_verdict_refuses_numbers_that_would_poison_a_mean(score: float, seconds: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Verdict(True, score, None, "correct", seconds)


def test_an_unverified_verdict_has_no_outcome():
    verdict = unverified_verdict("a worker was lost", 0.5)
    assert verdict == Verdict(False, 0.0, None, "unverified: a worker was lost", 0.5)
    assert verdict.unverified
    assert not is_failure(verdict.reason)


@pytest.mark.parametrize("reason", ["correct", "wrong answer", "timeout", "unverifiedly", "not unverified: x", ""])
def test_any_other_reason_is_a_verdict(reason):
    assert not is_unverified(reason)
    assert not Verdict(False, 0.0, None, reason, 0.0).unverified


@pytest.mark.parametrize(("correct", "score"), [(True, 0.0), (False, 0.5), (True, 1.0)])
@pytest.mark.parametrize("reason", [UNVERIFIED, f"{UNVERIFIED}: no memory"])
def test_an_unverified_response_cannot_be_scored(reason, correct, score):
    with pytest.raises(ValueError, match="must be incorrect with score 0"):
        Verdict(correct, score, None, reason, 0.0)


class Unsafe:
    """Notices a second thread, which it invites by waiting in every call."""

    def __init__(self) -> None:
        self.inside = self.together = 0
        self._pause = threading.Event()

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        self.inside += 1
        self.together = max(self.together, self.inside)
        self._pause.wait(0.005)
        self.inside -= 1
        return [Verdict(text == "4", float(text == "4"), text, "correct" if text == "4" else "wrong", 0.0)
                for _, text in items]  # fmt: skip


def test_threads_take_turns_and_get_their_own_verdicts() -> None:
    """Also through a copy of the grader, which has the same verifiers."""
    prompt, verifier = Prompt("p", "2 + 2", (1,), "4", "sum"), Unsafe()
    grader = Grader({"sum": verifier}, lambda tokens: str(tokens[0]), RewardShaping())  # type: ignore[dict-item]
    graders = [grader, replace(grader, max_new_tokens=1)]

    def verdict(number: int) -> bool:
        tree = RolloutTree.from_responses((1,), [(number % 8,)] * 2)
        (group,) = graders[number % 2].verify([prompt], [tree])
        return bool(group.correct_L[0])

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(verdict, range(16))) == [number % 8 == 4 for number in range(16)]
    assert verifier.together == 1


class Scripted:
    """Gives each response the reason that it states."""

    def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
        return [verdict_of(REASONS[int(text)]) for _, text in items]


REASONS = (
    "wrong answer",
    "verifier raised KeyError: 'x'",
    "verifier returned str, not a bool",
    "timeout",
    "unverified",
)


@each_row(
    ("steps", "fails_at"),
    [
        ([[[1, 1], [2, 1]]], 0),  # steps of prompts of responses; every response of the first step
        ([[[1, 1], [1, 0]]], None),  # one of them was judged
        ([[[1, 1]], [[1]]], 1),  # one prompt can be the reason
        ([[[1, 1]], [[0]], [[1], [1]]], None),  # it has worked before
        ([[[3, 1], [1, 1]]], None),  # a time limit is counted elsewhere
        ([[[4], [4]], [[1], [4]], [[2], [4]]], 2),  # unverified responses say nothing
    ],
)
def test_a_verifier_that_fails_on_every_response_ends_the_run(
    steps: list[list[list[int]]], fails_at: int | None
) -> None:
    grader = Grader({"sum": Scripted()}, lambda tokens: str(tokens[0]), RewardShaping())  # type: ignore[dict-item]
    for number, step in enumerate(steps):
        prompts = [Prompt(f"p{place}", "2 + 2", (1,), "4", "sum") for place in range(len(step))]
        trees = [RolloutTree.from_responses((1,), [(response,) for response in group]) for group in step]
        if number == fails_at:
            with pytest.raises(BrokenVerifierError, match=r"failed on every response to the first 2 prompts.*: ver"):
                grader.verify(prompts, trees)
        else:
            grader.verify(prompts, trees)


THINK = r"<think>.+</think>\s*\\boxed\{[^}]*\}"


@each_row(
    ("text", "wanted"),
    [
        ("<think>a</think>\\boxed{3}", True),
        ("  <think>a\nb</think>\n\n\\boxed{3}\n", True),
        ("so <think>a</think>\\boxed{3}", False),
        ("<think>a</think>\\boxed{3} indeed", False),
        ("<think></think>\\boxed{3}", False),
        ("", False),
    ],
)
def test_the_whole_text_counts(text: str, wanted: bool) -> None:
    assert has_format(text, THINK) is wanted


@given(st.text(alphabet="ab \n", max_size=12))
def test_it_agrees_with_the_standard_library(text: str) -> None:
    pattern = r"a.*b+"
    assert has_format(text, pattern) == bool(re.fullmatch(pattern, text.strip(), re.DOTALL))


@pytest.mark.slow
def test_a_pattern_that_never_comes_to_an_end_does_not_match() -> None:
    assert not has_format("a" * 5_000 + "b", r"(a|aa)+(a|aa)+(a|aa)+(a|aa)+c")
    assert has_format("aaa", r"(a|aa)+")


@pytest.mark.parametrize(("sees", "expected"), [("last", ["1 2", "7"]), ("all", ["1 2", "3 4\n6 7\n7"])])
def test_verifiers_see_turns_of_the_model_and_never_results(sees: Sees, expected: list[str]) -> None:
    """The answer 99 stands in a result alone; no verifier sees it, whatever it is told to see."""
    tree = RolloutTree.from_responses(
        (5,), [(1, 2), (3, 4, 99, 99, 6, 7, 99, 7)], given=[[False] * 2, [t == 99 for t in (3, 4, 99, 99, 6, 7, 99, 7)]]
    )
    assert [sum(map(len, turns)) for turns in tree.turns()] == tree.length.tolist() == [2, 5]

    class Seen:
        def verify_all(self, items: Sequence[tuple[Prompt, str]]) -> list[Verdict]:
            assert [text for _, text in items] == expected
            return [verdict_of("wrong answer") for _ in items]

    prompt = replace(prompt_named("p"), token_ids=(5,))
    grader = Grader({prompt.domain: Seen()}, lambda ids: " ".join(map(str, ids)), RewardShaping(), sees=sees)  # type: ignore[dict-item]
    (group,) = grader.verify([prompt], [tree])
    assert grader.texts(group) == expected
