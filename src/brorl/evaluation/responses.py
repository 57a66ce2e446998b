"""The responses of an evaluation on disk: in parts, so that an evaluation can be interrupted at any instant and go on.

In: parts, each some prompts of one data set with the seed of their sampling, and the trees and verdicts of a part. Out:
one Parquet file a part, one row a distinct response, and the counts of its prompts in the file's metadata. A file has
its name only when it is complete, and what is sampled depends on the part alone: parts that are done are never done
again, and an evaluation that went on is the one that was never interrupted. A folder that holds another evaluation is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from brorl.errors import UserError, first_line
from brorl.evaluation.summary import PromptResult
from brorl.prompts.prompt import Prompt
from brorl.storage import replace_file, storage_errors
from brorl.tree import RolloutTree
from brorl.verify.verifier import Verdict

_METADATA = b"brorl"
_GO_ON = "give the same command again"
SCHEMA = pa.schema([
    ("data_set", pa.string()), ("prompt_id", pa.string()), ("domain", pa.string()), ("prompt", pa.string()),
    ("reference", pa.string()), ("response", pa.string()), ("token_ids", pa.list_(pa.int32())),
    ("logprobs", pa.list_(pa.float32())), ("count", pa.int32()), ("num_rollouts", pa.int32()),
    ("finished", pa.bool_()), ("correct", pa.bool_()), ("score", pa.float64()), ("extracted", pa.string()),
    ("reason", pa.string()),
])  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Some prompts of one data set, sampled by one call of the engine.

    Attributes:
        index: Number of the part, from 0 on.
        data_set: The data set.
        prompts: Its prompts.
        seed: Seed of the sampling; it depends on the evaluation's seed, the data set and the place in it alone.
    """

    index: int
    data_set: str
    prompts: tuple[Prompt, ...]
    seed: int


@dataclass(frozen=True)
class StoredPart:
    """What is known of a part that is done.

    Attributes:
        results: The counts of its prompts.
        seconds: What sampling, verifying and storing them took.
    """

    results: tuple[PromptResult, ...]
    seconds: float


def split_into_parts(prompts_of: Mapping[str, Sequence[Prompt]], size: int, seed: int) -> list[Part]:
    """Split data sets into parts.

    Args:
        prompts_of: Prompts of each data set.
        size: Prompts per part, 1 or more; the last part of a data set may have fewer.
        seed: Seed of the evaluation.

    Returns:
        All parts. The first parts of a data set are the same whatever follows them, and whatever other sets there are.
    """
    parts: list[Part] = []
    for name, prompts in prompts_of.items():
        for number, start in enumerate(range(0, len(prompts), size)):
            digest = blake2b(f"evaluation {seed}, part {number} of {name}".encode(), digest_size=8).digest()
            chosen = tuple(prompts[start : start + size])
            parts.append(Part(len(parts), name, chosen, int.from_bytes(digest, "little")))
    return parts


@dataclass(frozen=True)
class ResponseStore:
    """The folder of an evaluation.

    Attributes:
        path: The folder; it exists.
    """

    path: Path

    @property
    def settings_file(self) -> Path:
        """What was evaluated, and how."""
        return self.path / "settings.json"

    @property
    def sittings_file(self) -> Path:
        """What each sitting was made with."""
        return self.path / "sittings.json"

    @property
    def responses(self) -> Path:
        """One Parquet file a part."""
        return self.path / "responses"

    def check(self, settings: Mapping[str, Any], whole: bool = False) -> None:
        """Refuse a folder that holds something else.

        Args:
            settings: What decides the responses, or some of it, as JSON takes it.
            whole: Whether it is all of it.

        Raises:
            UserError: If the folder is of another evaluation, naming the first difference, or of something else.
        """
        if not self.settings_file.is_file():
            others = sorted(p.name for p in self.path.iterdir() if not p.name.startswith(".") and p.name != "env.json")
            if others:
                raise UserError(
                    f"--output-dir {self.path} is not empty ({others[0]}, ...) and holds no evaluation; choose another "
                    "folder"
                )
            return
        try:
            stored = dict(_flat(json.loads(self.settings_file.read_text("utf-8"))))
        except ValueError as error:
            raise UserError(f"{self.settings_file} is damaged ({error}); choose another --output-dir") from error
        wanted = dict(_flat(json.loads(json.dumps(settings))))
        for name in (*wanted, *(stored if whole else ())):
            its, ours = stored.get(name), wanted.get(name)
            if its != ours:
                raise UserError(
                    f"--output-dir {self.path} holds another evaluation: its {name} is {_short(its)}, this command's "
                    f"is {_short(ours)}; choose another folder, or give its settings to go on with it"
                )

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Write down what is evaluated, unless the folder says it already, and remove what a kill left half written.

        Raises:
            UserError: If the folder holds something else.
            StorageError: If the disk does not take it.
        """
        self.check(settings, whole=True)
        with storage_errors(self.settings_file, _GO_ON):
            for left in (*self.path.glob(".*.tmp"), *self.responses.glob(".*.tmp")):
                left.unlink()
            if not self.settings_file.is_file():
                replace_file(self.settings_file, json.dumps(settings, indent=2).encode())
            self.responses.mkdir(exist_ok=True)  # after the settings, without which the folder would be refused

    def add_sitting(self, made_with: Mapping[str, Any]) -> None:
        """Write down, before its first part, what a sitting is made with: an evaluation may go on on another machine.

        Args:
            made_with: Versions, machine and command, as JSON takes them.

        Raises:
            UserError: If what is written of earlier sittings is damaged.
            StorageError: If the disk does not take it.
        """
        sittings = [*self.sittings(), dict(made_with)]
        with storage_errors(self.sittings_file, _GO_ON):
            replace_file(self.sittings_file, json.dumps(sittings, indent=2).encode())

    def sittings(self) -> list[dict[str, Any]]:
        """Return what each sitting so far was made with, in their order.

        Raises:
            UserError: If the file is damaged.
        """
        if not self.sittings_file.is_file():
            return []
        try:
            sittings: list[dict[str, Any]] = json.loads(self.sittings_file.read_text("utf-8"))
        except ValueError as error:
            raise UserError(f"{self.sittings_file} is damaged ({error}); delete it, then {_GO_ON}") from error
        return sittings

    def file_of(self, part: Part) -> Path:
        """Return the file of a part."""
        return self.responses / f"part-{part.index:05d}.parquet"

    def read(self, part: Part) -> StoredPart | None:
        """Return what is known of a part, None if it is not done.

        Raises:
            UserError: If its file is damaged or of other prompts.
        """
        file = self.file_of(part)
        if not file.is_file():
            return None
        try:
            metadata = json.loads(parquet.read_schema(file).metadata[_METADATA])
            results = tuple(PromptResult(**result) for result in metadata["results"])
            seconds = float(metadata["seconds"])
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file} is damaged ({first_line(error)}); delete it, then {_GO_ON}") from error
        if [r.prompt_id for r in results] != [p.id for p in part.prompts]:
            raise UserError(f"{file} holds other prompts than part {part.index}; delete it, then {_GO_ON}")
        return StoredPart(results, seconds)

    def write(
        self,
        part: Part,
        trees: Sequence[RolloutTree],
        verdicts: Sequence[Sequence[Verdict]],
        texts: Sequence[Sequence[str]],
        done: StoredPart,
    ) -> None:
        """Store a part; it is on disk when this returns.

        Args:
            part: The part.
            trees: The tree of each prompt.
            verdicts: For each prompt the verdict of each distinct response.
            texts: For each prompt the text of each distinct response.
            done: Its counts and its time.

        Raises:
            StorageError: If the disk does not take it.
        """
        table = _table(part, trees, verdicts, texts)
        metadata = {"results": [asdict(result) for result in done.results], "seconds": done.seconds}
        table = table.replace_schema_metadata({_METADATA: json.dumps(metadata).encode()})
        file = self.file_of(part)
        with storage_errors(file, _GO_ON):
            sink = pa.BufferOutputStream()
            parquet.write_table(table, sink, compression="zstd")
            replace_file(file, sink.getvalue().to_pybytes())


def _table(
    part: Part, trees: Sequence[RolloutTree], verdicts: Sequence[Sequence[Verdict]], texts: Sequence[Sequence[str]]
) -> pa.Table:
    """Return one row a distinct response; long lists of tokens never become Python objects."""
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    for prompt, tree, verdicts_L, text_L in zip(part.prompts, trees, verdicts, texts, strict=True):
        for i, (verdict, text) in enumerate(zip(verdicts_L, text_L, strict=True)):
            path = tree.path(int(tree.leaf[i]))
            row = (
                part.data_set, prompt.id, prompt.domain, prompt.text, prompt.reference, text, tree.token[path],
                tree.logprob[path], int(tree.leaf_count[i]), tree.num_rollouts, bool(tree.finished[i]),
                verdict.correct, verdict.score, verdict.extracted, verdict.reason,
            )  # fmt: skip
            for name, value in zip(SCHEMA.names, row, strict=True):
                columns[name].append(value)
    arrays = [
        _lists(columns[field.name], field.type)
        if pa.types.is_list(field.type)
        else pa.array(columns[field.name], field.type)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _lists(values: Sequence[np.ndarray[Any, Any]], kind: pa.ListType) -> pa.ListArray:
    offsets = np.cumsum([0, *(value.size for value in values)], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(values), kind.value_type))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names and the values of nested settings; an empty group is a value."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(item, f"{name}.{key}" if name else key)
    else:
        yield name, value


def _short(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
