"""The responses of an evaluation on disk, in batches of prompts. An interrupted evaluation can be continued.

Each batch is one Parquet file (`part-*.parquet`) with one row per distinct response, and the counts of the prompts in
its metadata. A file gets its name when it is complete, and the responses of a batch depend on the batch alone. So a
stored batch is never sampled again, and a continued evaluation equals an uninterrupted one. Folders of another
evaluation and folders with other files are rejected.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from brorl.activity import Echo, Observe, Phase, unobserved
from brorl.algorithms.groups import Group
from brorl.errors import UnverifiedResponsesError, UserError, first_line, option
from brorl.evaluation.summary import PromptResult, count
from brorl.format import duration, short_repr
from brorl.prompts.prompt import Prompt
from brorl.rollout.engine import Engine
from brorl.runs.stored_rollouts import responses_table
from brorl.sampling import SamplingParams
from brorl.storage import dotted, parquet_bytes, replace_file, storage_errors
from brorl.verification.grade import Grader

_METADATA = b"brorl"
_RERUN = "rerun the command"


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of one dataset that one call of the engine samples."""

    index: int  # number of the batch, from 0
    data_set: str  # the dataset
    prompts: tuple[Prompt, ...]  # its prompts
    seed: int  # seed of the sampling. It depends on the evaluation's seed, the dataset and the place in it alone.


@dataclass(frozen=True)
class StoredBatch:
    """The counts of an evaluated batch."""

    results: tuple[PromptResult, ...]  # the counts of its prompts
    seconds: float  # time of sampling, verifying and storing


def split_into_batches(prompts_of: Mapping[str, Sequence[Prompt]], size: int, seed: int) -> list[PromptBatch]:
    """Split the prompts of datasets into batches, which depend on no later prompts of the dataset and on no others."""
    batches: list[PromptBatch] = []
    for name, prompts in prompts_of.items():
        for number, start in enumerate(range(0, len(prompts), size)):
            digest = blake2b(f"evaluation {seed}, part {number} of {name}".encode(), digest_size=8).digest()
            chosen = tuple(prompts[start : start + size])
            batches.append(PromptBatch(len(batches), name, chosen, int.from_bytes(digest, "little")))
    return batches


@dataclass(frozen=True)
class ResponseStore:
    """The folder of an evaluation."""

    path: Path  # the folder. It exists.

    @property
    def settings_file(self) -> Path:
        """The settings of the evaluation."""
        return self.path / "settings.json"

    @property
    def sessions_file(self) -> Path:
        """Versions, machine and command of each process that sampled."""
        return self.path / "sessions.json"

    @property
    def responses(self) -> Path:
        """Folder of one Parquet file per batch."""
        return self.path / "responses"

    def check(self, settings: Mapping[str, Any], complete: bool = False) -> None:
        """Check that the folder is empty or contains an evaluation with these settings.

        If they are not `complete`, the folder may have more.
        """
        if not self.settings_file.is_file():
            others = sorted(p.name for p in self.path.iterdir() if not p.name.startswith(".") and p.name != "env.json")
            if others:
                raise UserError(
                    f"{option('output-dir', self.path)} is not empty ({others[0]}, ...) and contains no evaluation; "
                    "choose "
                    "another folder"
                )
            return
        stored = dict(dotted(_read_json(self.settings_file, f"choose another {option('output-dir')}")))
        wanted = dict(dotted(json.loads(json.dumps(settings))))
        for name in (*wanted, *(stored if complete else ())):
            old, new = stored.get(name), wanted.get(name)
            if old != new:
                raise UserError(
                    f"{option('output-dir', self.path)} contains another evaluation: {name} is {_shown(old)} there and "
                    f"{_shown(new)} here; choose another folder, or use the settings of that evaluation to continue it"
                )

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Store the settings, unless they are stored already, and remove the temporary files of a killed process."""
        self.check(settings, complete=True)
        with storage_errors(self.settings_file, _RERUN):
            for left in (*self.path.glob(".*.tmp"), *self.responses.glob(".*.tmp")):
                left.unlink()
            if not self.settings_file.is_file():
                replace_file(self.settings_file, json.dumps(settings, indent=2).encode())
            self.responses.mkdir(exist_ok=True)  # after the settings: `check` rejects a folder without them

    def add_session(self, environment: Mapping[str, Any]) -> None:
        """Store versions, machine and command of this process before its first batch: another machine may continue."""
        sessions = [*self.sessions(), dict(environment)]
        with storage_errors(self.sessions_file, _RERUN):
            replace_file(self.sessions_file, json.dumps(sessions, indent=2).encode())

    def sessions(self) -> list[dict[str, Any]]:
        """Return the environment of each process that sampled, in order."""
        if not self.sessions_file.is_file():
            return []
        sessions: list[dict[str, Any]] = _read_json(self.sessions_file, f"delete it and {_RERUN}")
        return sessions

    def file_of(self, batch: PromptBatch) -> Path:
        """Return the file of a batch."""
        return self.responses / f"part-{batch.index:05d}.parquet"

    def read(self, batch: PromptBatch) -> StoredBatch | None:
        """Return the counts of a batch; None if it is not stored."""
        file = self.file_of(batch)
        if not file.is_file():
            return None
        try:
            metadata = json.loads(parquet.read_schema(file).metadata[_METADATA])
            results = tuple(PromptResult(**result) for result in metadata["results"])
            seconds = float(metadata["seconds"])
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file} is damaged ({first_line(error)}); delete it and {_RERUN}") from error
        if [r.prompt_id for r in results] != [p.id for p in batch.prompts]:
            raise UserError(f"{file} does not contain the prompts of batch {batch.index}; delete it and {_RERUN}")
        return StoredBatch(results, seconds)

    def write(
        self, batch: PromptBatch, groups: Sequence[Group], texts: Sequence[Sequence[str]], stored: StoredBatch
    ) -> None:
        """Store a batch. It is on disk when this returns."""
        metadata = {"results": [asdict(result) for result in stored.results], "seconds": stored.seconds}
        table = responses_table(batch.index, groups, texts).drop_columns(["step", "reward"])
        table = table.add_column(0, "data_set", pa.array([batch.data_set] * len(table), pa.string()))
        table = table.replace_schema_metadata({_METADATA: json.dumps(metadata).encode()})
        file = self.file_of(batch)
        with storage_errors(file, _RERUN):
            replace_file(file, parquet_bytes(table))


def _read_json(file: Path, advice: str) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is damaged ({error}); {advice}") from error


def _shown(value: Any) -> str:
    return "not set" if value is None else short_repr(value)


@dataclass(frozen=True)
class EvaluatedModel:
    """A model under evaluation, with the grader of its responses."""

    engine: Engine  # samples responses
    sampling: SamplingParams  # sampling parameters
    num_rollouts: int  # responses per prompt, n
    grader: Grader  # verifies responses
    observe: Observe = unobserved  # called at the start of each phase

    def evaluate(self, batch: PromptBatch, store: ResponseStore) -> StoredBatch:
        """Sample, verify and store a batch; if most responses could not be verified, stop without storing it."""
        started = perf_counter()
        self.observe(Phase("generation", f"{len(batch.prompts)} prompts of {batch.data_set}"))
        token_ids = [prompt.token_ids for prompt in batch.prompts]
        trees = self.engine.sample(token_ids, self.num_rollouts, self.sampling, batch.seed)
        self.observe(Phase("verification"))
        groups = self.grader.verify(batch.prompts, trees)
        lost, responses = sum(group.num_unverified for group in groups), sum(tree.num_rollouts for tree in trees)
        if 2 * lost > responses:
            reasons = Counter(v.reason for group in groups for v in group.verdicts if v.unverified)
            raise UnverifiedResponsesError(
                f"{lost:,} of {responses:,} responses could not be verified (most often: "
                f"{reasons.most_common(1)[0][0]}); free memory and processes, then rerun the command to continue"
            )
        texts = [self.grader.texts(tree) for tree in trees]
        stored = StoredBatch(tuple(map(count, groups)), perf_counter() - started)
        store.write(batch, groups, texts, stored)
        return stored


def evaluate_batches(
    batches: Sequence[PromptBatch], model: EvaluatedModel, store: ResponseStore, echo: Echo = lambda _: None
) -> list[StoredBatch]:
    """Evaluate all batches that are not stored yet, with a line of progress after each; return the counts of all."""
    stored = [store.read(batch) for batch in batches]
    left = sum(len(batch.prompts) for batch, read in zip(batches, stored, strict=True) if read is None)
    started, new = perf_counter(), 0
    for i, batch in enumerate(batches):
        if stored[i] is not None:
            continue
        stored[i] = new_batch = model.evaluate(batch, store)
        new += len(batch.prompts)
        same_set = [j for j, other in enumerate(batches) if other.data_set == batch.data_set]
        results = [result for j in same_set if (read := stored[j]) for result in read.results]
        fractions = [r.num_correct / r.num_verified for r in results if r.num_verified]
        tokens_per_second = sum(r.sampled_tokens for r in new_batch.results) / max(new_batch.seconds, 1e-9)
        seconds_left = (perf_counter() - started) / new * (left - new)
        echo(
            f"{batch.data_set}  {len(results)}/{sum(len(batches[j].prompts) for j in same_set)} prompts  "
            f"pass@1 so far {sum(fractions) / max(len(fractions), 1):.3f}  {tokens_per_second:,.0f} tokens/s  "
            f"ETA {duration(seconds_left)}"
        )
    return [batch for batch in stored if batch is not None]
