"""Prompts: a `Question` is read from data, a `Prompt` is read by a model, and a `PromptStream` orders prompts.

The order depends only on (seed, source, epoch) and the weights; a resumed run continues it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, cached_property
from hashlib import blake2b
from math import ceil, floor, isfinite
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError

from brorl.format import short_repr
from brorl.prompts.decimal_commas import ColumnReading
from brorl.seeds import seed_sequence

CODE_DOMAIN, COUNTDOWN_DOMAIN, ENVIRONMENT_DOMAIN, GYM_DOMAIN, INSTRUCTIONS_DOMAIN, MATH_DOMAIN, SCIENCE_DOMAIN = (
    "code", "countdown", "environment", "gym", "ifeval", "math", "science",
)  # fmt: skip
"""The built-in domains."""

JSON_NAMES = {
    list: "a list", dict: "an object", str: "text", int: "a number", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip


def read_json(kind: Any, text: str, form: str) -> Any:
    """Read a dataclass from JSON text, strictly; other text raises a `ValueError` with the problem and the `form`."""
    try:
        return _adapter(kind).validate_json(text, strict=True)
    except ValidationError as errors:
        error = errors.errors(include_url=False)[0]
    place, problem = ".".join(map(str, error["loc"])), f"{error['msg'][:1].lower()}{error['msg'][1:]}"
    match error["type"]:
        case "value_error":  # the class itself raised it
            raise ValueError(str(error["ctx"]["error"]))
        case "json_invalid":
            found = f"is not JSON text ({error['ctx']['error']})"
        case "missing" | "missing_argument":
            found = f"has no {place}"
        case "extra_forbidden" | "unexpected_keyword_argument":
            found = f"has the unknown key {place}"
        case _:
            found = f"has {short_repr(error['input'])}{place and f' as {place}'} ({problem})"
    raise ValueError(f"{found}; expected {form}")


_adapter = cache(TypeAdapter)


def json_problem(error: Exception) -> str:
    """Return in a few words what `json` found wrong in a text."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return f"a number has more than {sys.get_int_max_str_digits():,} digits; write it as text"


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str  # `system`, `user`, `assistant`, or another role of the model's chat template
    content: str


@dataclass(frozen=True)
class Question:
    """One question with a reference answer, as in the data."""

    id: str  # unique name, the same in all runs
    text: str  # the question; empty if `messages` hold it
    reference: str  # the verifier of `domain` reads this answer: `22`, or JSON such as tests of a program
    domain: str  # name of the verifier
    source: str = ""  # name of the data that the question is from
    messages: tuple[Message, ...] = ()  # instead of `text`: a conversation that ends with the user's turn
    # File and row, for error messages; empty for a generated question. Equality ignores it.
    location: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.messages):
            raise ValueError(
                f"question {self.id!r} must have exactly one of text and messages, got text {self.text!r} and "
                f"{len(self.messages)} messages"
            )
        if self.messages and self.messages[-1].role != "user":
            raise ValueError(
                f"the messages of question {self.id!r} end with the role {self.messages[-1].role!r}; "
                "end them with the user's turn, for the model to answer"
            )

    @property
    def name(self) -> str:
        """The id, followed by file and row if known: `rows:9 (rows.jsonl line 9)`."""
        return f"{self.id} ({self.location})" if self.location else self.id

    @property
    def last_turn(self) -> str:
        """The text, or the last message."""
        return self.messages[-1].content if self.messages else self.text

    @property
    def key(self) -> str:
        """The text or the messages as one string. Questions with equal keys are the same question.

        The question of an environment is its whole row: games with the same text differ in their other columns.
        """
        if self.domain == ENVIRONMENT_DOMAIN:
            return self.reference
        if not self.messages:
            return self.text
        return json.dumps([[message.role, message.content] for message in self.messages], ensure_ascii=False)

    @property
    def words(self) -> str:
        """The key without system messages and white space. Training drops questions whose words are evaluated on."""
        if self.domain == ENVIRONMENT_DOMAIN:
            return self.key
        turns = [message for message in self.messages if message.role != "system"]
        if len(turns) <= 1:
            return " ".join((turns[0].content if turns else self.text).split())
        texts = [[message.role, " ".join(message.content.split())] for message in turns]
        return json.dumps(texts, ensure_ascii=False)


def with_text_after(question: Question, text: str) -> Question:
    """Return a question with a text at the end of its last turn."""
    if not question.messages:
        return replace(question, text=question.text + text)
    *before, last = question.messages
    return replace(question, messages=(*before, replace(last, content=last.content + text)))


_T = TypeVar("_T")


class Split(NamedTuple, Generic[_T]):
    """Questions to train on, and held-out questions that training never sees."""

    train: list[_T]
    held_out: list[_T]


@dataclass(frozen=True)
class SourceReading:
    """The questions of a source, and counts of its rows."""

    questions: Sequence[Question]  # distinct questions, in the order of the rows
    num_rows: int  # rows read
    num_repeated: int = 0  # rows that repeat a question with the same answer
    # Rows that the layout dropped: reason -> count; empty without a layout.
    dropped: Mapping[str, int] = field(default_factory=dict)
    commas: ColumnReading | None = None  # how commas in numbers were read; None if there are none


def split_held_out(questions: Iterable[Question], fraction: float, seed: int) -> Split[Question]:
    """Split questions by a hash of their words (`Question.words`).

    A question's side depends only on its words and the seed, so two sources with the same question agree. The held-out
    questions are shuffled by words and seed. The first k are a uniform sample, and they are the same k for every
    fraction that holds out k or more. A larger fraction holds out all that a smaller fraction does.
    """
    train: list[Question] = []
    held_out: list[tuple[int, Question]] = []
    for question in questions:
        draw = uniform_hash(f"question split {seed}: {question.words}")
        if draw < fraction * 2**64:
            held_out.append((draw, question))
        else:
            train.append(question)
    held_out.sort(key=lambda pair: (pair[0], pair[1].key, pair[1].id))
    return Split(train, [question for _, question in held_out])


def drop_evaluated(questions: Iterable[Question], evaluated: Iterable[Question]) -> tuple[list[Question], int]:
    """Drop training questions whose words are evaluated on; return the rest, in order, and the number dropped."""
    asked = {question.words for question in evaluated}
    every = list(questions)
    kept = [question for question in every if question.words not in asked]
    return kept, len(every) - len(kept)


def uniform_hash(key: str) -> int:
    """Return a uniform number from 0 to 2**64 - 1, the same on any machine and in any version of Python."""
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")


Cells = Mapping[str, Any]  # a row: column -> value


class DroppedRow(Exception):  # noqa: N818
    """A row has no question that can be verified. Dropped rows are counted by message, so messages are general."""


def question_of(text: str, reference: str, domain: str, missing: str = "no answer") -> Question:
    """Return the question of a row, without id and source; without a reference, raise `DroppedRow(missing)`."""
    for part, problem in ((text, "no question"), (reference, missing)):
        if not part.strip():
            raise DroppedRow(problem)
        try:
            part.encode()
        except UnicodeEncodeError:
            raise DroppedRow("an unpaired surrogate") from None
    return Question("", text, reference, domain)


_LONGEST_REFERENCE = 2_000  # store at most this many characters


class PromptIds(tuple[int, ...]):
    """Token ids of a prompt that know the row of the prompt: two games can begin with the same text.

    Equality ignores the row.
    """

    row: str  # the columns as JSON

    def __new__(cls, token_ids: Iterable[int], row: str) -> Self:
        """Make the ids of a prompt."""
        ids = super().__new__(cls, token_ids)
        ids.row = row
        return ids

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[int, ...], str]]:
        """Pickle the row too."""
        return type(self), (tuple(self), self.row)


def row_of(token_ids: Sequence[int]) -> str:
    """Return the row that a prompt's ids know; an empty text if they know none."""
    return token_ids.row if isinstance(token_ids, PromptIds) else ""


@dataclass(frozen=True)
class Prompt:
    """One question for the model."""

    id: str  # unique name, the same in all runs
    text: str  # the model reads this text: the question with system prompt and template
    token_ids: tuple[int, ...]  # `text` as token ids; empty in stored rollouts, which nothing samples again
    reference: str  # the verifier of `domain` reads this answer
    domain: str  # name of the verifier
    source: str = ""  # name of the question's data, for results by source
    question: str = ""  # the question without system prompt and template, for lists; empty if unknown


def stored_reference(reference: str) -> str:
    """Return a reference for files of responses; a long one becomes its beginning, its length and a hash.

    Every response is stored with its reference, and the tests of a program can take megabytes.
    """
    if len(reference) <= _LONGEST_REFERENCE:
        return reference
    digest = blake2b(reference.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{reference[:_LONGEST_REFERENCE]}... ({len(reference):,} characters, blake2b {digest})"


def fingerprint(prompts: Iterable[Prompt]) -> str:
    """Return a hash of the prompts' ids, token ids, references and domains, in order."""
    digest = blake2b(digest_size=16)
    for prompt in prompts:
        for text in (prompt.id, prompt.reference, prompt.domain):
            encoded = text.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        tokens = np.asarray(prompt.token_ids, dtype="<i8")
        digest.update(len(tokens).to_bytes(8, "little") + tokens.tobytes())
    return digest.hexdigest()


class PromptStream:
    """Endless, seeded, resumable order of the prompts of one or several sources.

    Every epoch of a source has each of its prompts once. Every prefix of the order has each source's fraction to within
    one prompt. The schedule of sources is fair: with fraction w, a source's j-th turn comes at turn floor((j - 1) / w)
    or later, and before turn ceil(j / w). Among the sources whose turn may come, the one with the earliest deadline is
    next. So |turns among the first n - n w| < 1 for every n. Picking the source that lags most would not ensure this.

    Source: Baruah, Cohen, Plaxton, Varvel, "Proportionate progress", Algorithmica 15 (1996), on one processor.

    Args:
        prompts: The prompts, with distinct ids, at least one.
        seed: Seed of the shuffles, 0 to 2**64 - 1.
        weights: The fraction of each source (`Prompt.source`), relative to the others, above 0. Printed decimals count:
            0.1 and 0.2 are exactly one to two. None if the prompts are of one source.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, weights: Mapping[str, float] | None = None) -> None:
        wrong = next((weight for weight in (weights or {}).values() if not (isfinite(weight) and weight > 0)), None)
        if wrong is not None:
            raise ValueError(
                f"the weight of a source must be a positive number, got {wrong}; remove a source that should not be "
                "used"
            )
        exact = {None: Fraction(1)} if weights is None else {s: Fraction(str(weight)) for s, weight in weights.items()}
        self.prompts = tuple(prompts)
        self._of_source = [[p for p in prompts if source in (None, p.source)] for source in exact]
        if not exact or not all(self._of_source):
            raise ValueError("a stream needs at least one prompt, got none; add data, or lower data.held_out_fraction")
        twice = next((name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1), None)
        if twice is not None:
            raise ValueError(f"two prompts have the id {twice!r}; give each prompt another id")
        self._fractions = [weight / sum(exact.values()) for weight in exact.values()]
        self._turns = [0] * len(exact)
        self._seed = seed
        self._orders = [self._order_of(source, 0) for source in range(len(exact))]

    @property
    def num_prompts(self) -> int:
        """Number of prompts."""
        return len(self.prompts)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the prompts, in order."""
        return fingerprint(self.prompts)

    def take(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts, from as many epochs as needed."""
        taken: list[Prompt] = []
        for _ in range(n):
            turn = sum(self._turns)
            _, source = min(
                (ceil((turns + 1) / fraction), source)
                for source, (turns, fraction) in enumerate(zip(self._turns, self._fractions, strict=True))
                if floor(turns / fraction) <= turn
            )
            prompts = self._of_source[source]
            epoch, position = divmod(self._turns[source], len(prompts))
            if not position:
                self._orders[source] = self._order_of(source, epoch)
            taken.append(prompts[self._orders[source][position]])
            self._turns[source] += 1
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return each source's `turns` so far, its exact fraction (`shares`), and fingerprints of the prompts."""
        return {
            "turns": list(self._turns),
            "shares": [str(fraction) for fraction in self._fractions],
            "num_prompts": self.num_prompts,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; prompts, sources, weights and seed must be the same."""
        own = self.state_dict()
        if set(state) != set(own):
            raise ValueError(
                f"a stream's state has the keys {', '.join(own)}, got {sorted(state)}; pass what state_dict() returned"
            )
        shares, own_shares = ", ".join(state["shares"]), ", ".join(own["shares"])
        for name, problem in (
            ("num_prompts", f"{state['num_prompts']} training prompts then, {self.num_prompts} now; restore the data"),
            ("fingerprint", f"still {self.num_prompts} training prompts, but other ids, tokens, references or domains, "
             "or another order; restore the data, the prompt settings and the tokenizer"),
            ("shares", f"the fractions of the sources were {shares} and are {own_shares}; restore the sources and "
             "their weights"),
        ):  # fmt: skip
            if state[name] != own[name]:
                raise ValueError(f"the data has changed since the run began: {problem}, or start a new run")
        self._turns = list(state["turns"])
        sizes = map(len, self._of_source)
        epochs = [turns // size for turns, size in zip(self._turns, sizes, strict=True)]
        self._orders = [self._order_of(source, epoch) for source, epoch in enumerate(epochs)]

    def _order_of(self, source: int, epoch: int) -> list[int]:
        generator = np.random.default_rng(seed_sequence(self._seed, epoch, source))
        order: list[int] = generator.permutation(len(self._of_source[source])).tolist()
        return order
