"""Rows of a file, a folder or a Hugging Face dataset, one after the other, each with its location.

JSON Lines, Parquet and datasets are streamed; a JSON array is read whole and decoded row by row. Unreadable data is a
`UserError` of one line that names the file and the line.
"""

from __future__ import annotations

import glob
import json
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from brorl.errors import UserError, first_line
from brorl.paths import is_file, is_folder

_PROBE_TIMEOUT_S = 4.0
_SUFFIXES = (".jsonl", ".json", ".parquet")
_DELIMITERS = {".csv": "", ".tsv": ", delimiter=chr(9)"}
_OTHER_SPLITS = ("test", "validation", "valid", "eval", "dev")
JSON_NAMES = {
    list: "a list", dict: "an object", str: "text", int: "a number", float: "a number", bool: "true or false",
    type(None): "null",
}  # fmt: skip
ROW_FORM = '{"prompt": ..., "answer": ...}'
MISSING = object()


class Row(NamedTuple):
    """A row of a data file."""

    location: str  # its file, or the dataset and its split, with the number of the line or row
    number: int  # number of the line or row, from 1 on
    part: str  # its file among several, relative to their common folder; empty for a single file
    columns: Sequence[str]  # names of all columns
    values: Mapping[str, Any]  # values of at least the wanted columns

    @property
    def key(self) -> str:
        """The number of the row, after its file if there are several."""
        return f"{self.part}:{self.number}" if self.part else str(self.number)

    def cell(self, column: str) -> Any:
        """Return the value of a column, or of a key inside one (`column.key`); `MISSING` if there is none."""
        if column in self.values:
            return self.values[column]
        value: Any = self.values
        for name in column.split("."):
            value = value.get(name, MISSING) if isinstance(value, Mapping) else MISSING
        return value


def is_local(path: str) -> bool:
    """Return whether rows are read from files here, not with `datasets`; the path is as in `read_rows`.

    Raises:
        UserError: If there are no such files, and it cannot be a dataset of the hub.
    """
    local = Path(path).expanduser()
    return not _is_saved_data_set(local) and _files_of(path, local) is not None


def read_rows(path: str, subset: str | None, split: str, wanted: Collection[str]) -> Iterator[Row]:
    """Read rows in order: files by name, then rows as in the file.

    Args:
        path: A file (`.jsonl`, `.json`, `.parquet`), a folder or a pattern (`*`, `?`, `[...]`, `**`) of such files, a
            folder that `datasets` saved, or the id of a dataset on the Hugging Face hub.
        subset: Configuration of a hub dataset.
        split: Split of a dataset; ignored for files.
        wanted: The columns that are used; the values of others can be missing.

    Raises:
        UserError: If there is no such data, or it cannot be read.
    """
    local = Path(path).expanduser()
    if _is_saved_data_set(local):
        yield from _data_set_rows(str(local), None, split, wanted)
        return
    files = _files_of(path, local)
    if files is None:
        yield from _data_set_rows(path, subset, split, wanted)
        return
    if subset is not None:
        raise UserError(
            f"{path} is not a Hugging Face dataset, so it has no subset {subset!r}; remove data.sources[].subset"
        )
    wild = [i for i, part in enumerate(local.parts) if glob.has_magic(part)]
    root = local if is_folder(local) else Path(*local.parts[: wild[0]]) if wild else local.parent
    for file in files:
        part = file.relative_to(root).as_posix() if len(files) > 1 else ""
        reader = _READERS[file.suffix.lower()]
        try:
            for row in reader(file, wanted):
                yield row._replace(part=part) if part else row
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror or error}); check data.sources[].path") from error


def _files_of(path: str, local: Path) -> list[Path] | None:
    """Return the files of a path, sorted; None if it can only be a dataset of the hub."""
    if is_file(local):
        if local.suffix.lower() not in _SUFFIXES:
            raise UserError(f"{path} is not a file that brorl reads ({', '.join(_SUFFIXES)}); {_conversion(local)}")
        return [local]
    if is_folder(local):
        return _files_in(path, local)
    if glob.has_magic(path):
        # Path.glob rejects absolute patterns.
        found = sorted(Path(name) for name in glob.glob(str(local), recursive=True))  # noqa: PTH207
        files = [file for file in found if file.is_file() and file.suffix.lower() in _SUFFIXES]
        if not files:
            raise UserError(
                f"no file matches {path} ({', '.join(_SUFFIXES)}; working folder {Path.cwd()}); fix data.sources[].path"
            )
        return files
    if local.suffix.lower() in (*_SUFFIXES, ".csv", ".txt", ".gz") or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path):
        raise UserError(
            f"there is no file or folder {path} (working folder {Path.cwd()}); fix data.sources[].path "
            "(the id of a Hugging Face dataset looks like openai/gsm8k)"
        )
    return None


def _conversion(file: Path) -> str:
    """Return how a file of another format is converted."""
    if file.suffix.lower() not in _DELIMITERS:
        return f"convert it, for instance with datasets: load_dataset(...).to_json('{file.stem}.jsonl')"
    rows = f"csv.DictReader(open(sys.argv[1], encoding='utf-8-sig', newline=''){_DELIMITERS[file.suffix.lower()]})"
    program = f"import csv, json, sys; [print(json.dumps(row)) for row in {rows}]"
    names = f"{shlex.quote(str(file))} > {shlex.quote(str(file.with_suffix('.jsonl')))}"
    return f'convert it: python3 -c "{program}" {names}'


def _files_in(path: str, folder: Path) -> list[Path]:
    """Return all files below a folder; files of several splits are an error."""
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in _SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not files:
        raise UserError(f"the folder {path} contains no {', '.join(_SUFFIXES)} file; fix data.sources[].path")
    names = [file.relative_to(folder).as_posix() for file in files]
    train_files = [name for name in names if re.search(r"(?<![a-z])train(?![a-z])", name.lower())]
    test_files = [name for name in names if re.search(rf"(?<![a-z])({'|'.join(_OTHER_SPLITS)})(?![a-z])", name.lower())]
    if train_files and test_files:
        raise UserError(
            f"the folder {path} contains several splits ({train_files[0]}, {test_files[0]}); name the files to train "
            f"on, such as data.sources[].path: {folder / train_files[0]}"
        )
    return files


def _jsonl_rows(path: Path, wanted: Collection[str]) -> Iterator[Row]:
    del wanted  # a line is decoded whole
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            location = f"{path} line {number}"
            text = _decode(raw, location, first=number == 1)
            if not text.strip():
                continue
            try:
                values = json.loads(text.rstrip())
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{location} is not JSON ({_problem(error)}); write one object per line, such as {ROW_FORM}"
                ) from error
            yield _row(values, location, number)


def _json_rows(path: Path, wanted: Collection[str]) -> Iterator[Row]:
    """Decode an array row by row: the text and one row are in memory, never all rows as objects."""
    text = _decode(path.read_bytes(), str(path), first=True)
    if text.lstrip().startswith("{"):  # many .json files have one row per line
        yield from _jsonl_rows(path, wanted)
        return
    if not text.strip():
        return
    decoder, space = json.JSONDecoder(), re.compile(r"[ \t\r\n]*")

    def skip(position: int) -> int:
        match = space.match(text, position)
        return match.end() if match else position

    def refuse(problem: str, position: int) -> UserError:
        line = text.count("\n", 0, position) + 1
        return UserError(f"{path} line {line} is not JSON ({problem}); a .json file is a list [{ROW_FORM}, ...]")

    position, number = skip(0), 0
    if not text.startswith("[", position):
        raise refuse("no list", position)
    position = skip(position + 1)
    ended = text.startswith("]", position)
    while not ended:
        number += 1
        try:
            values, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise refuse(error.msg, error.pos) from error
        except (ValueError, RecursionError) as error:
            raise refuse(_problem(error), position) from error
        yield _row(values, f"{path} row {number}", number)
        position = skip(position)
        ended = text.startswith("]", position)
        if not ended:
            if not text.startswith(",", position):
                raise refuse("a comma or the list's end ] is missing", position)
            position = skip(position + 1)
    if skip(position + 1) != len(text):
        raise refuse("there is text after the list", skip(position + 1))


def _parquet_rows(path: Path, wanted: Collection[str]) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = list(file.schema_arrow.names)
            chosen = [name for name in columns if name in wanted]
            batches = file.iter_batches(batch_size=1024, columns=chosen)
            yield from _arrow_rows(batches, str(path), columns, file.metadata.num_rows)
    except pyarrow.ArrowException as error:
        raise UserError(
            f"{path} is not a Parquet file that can be read ({first_line(error)}); write it again"
        ) from error


def _arrow_rows(batches: Iterable[Any], name: str, columns: Sequence[str], num_rows: int) -> Iterator[Row]:
    """Yield the rows of Arrow batches; a 32-bit float becomes its printed decimal, 0.1 and not 0.1000000015."""
    number = 0
    for batch in batches:
        if not batch.schema.names and num_rows:  # no wanted column: enough for an error that lists the columns
            yield Row(f"{name} row 1", 1, "", columns, {})
            return
        narrow = [field.name for field in batch.schema if str(field.type) in ("float", "halffloat")]
        kinds = {field.name: np.float32 if str(field.type) == "float" else np.float16 for field in batch.schema}
        for values in batch.to_pylist():
            number += 1
            for column in narrow:
                if values[column] is not None:
                    values[column] = float(str(kinds[column](values[column])))
            yield Row(f"{name} row {number}", number, "", columns, values)


_READERS: dict[str, Callable[[Path, Collection[str]], Iterator[Row]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}


def _decode(raw: bytes, location: str, first: bool) -> str:
    try:
        return raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{location} is not UTF-8 text (byte 0x{raw[error.start]:02x} at {error.start + 1}); save the file as UTF-8"
        ) from error


def _row(values: Any, location: str, number: int) -> Row:
    if not isinstance(values, dict):
        raise UserError(f"{location} is {JSON_NAMES[type(values)]}, not an object; write rows such as {ROW_FORM}")
    return Row(location, number, "", list(values), values)


def _problem(error: Exception) -> str:
    """Return the first line of an error, without what follows."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.colno}"
    return f"a number has more than {sys.get_int_max_str_digits():,} digits; write it as text"


def _is_saved_data_set(folder: Path) -> bool:
    return is_file(folder / "dataset_dict.json") or (
        is_file(folder / "state.json") and is_file(folder / "dataset_info.json")
    )


def _data_set_rows(path: str, subset: str | None, split: str, wanted: Collection[str]) -> Iterator[Row]:
    """Read a folder that `datasets` saved, or a dataset of the hub."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{path} is not a file here but may be a Hugging Face dataset, which needs the datasets package; "
            "run: pip install 'brorl[datasets]'"
        ) from error
    if _is_saved_data_set(Path(path)):
        try:
            rows = datasets.load_from_disk(path)
        except Exception as error:  # a broken folder can raise anything
            raise UserError(f"the dataset in {path} cannot be read ({first_line(error)}); save it again") from error
        if isinstance(rows, dict):
            if split not in rows:
                raise UserError(f"{path} has no split {split!r} (splits: {', '.join(rows)}); set data.sources[].split")
            rows = rows[split]
    else:
        try:
            with _without_retries(datasets, path):
                rows = datasets.load_dataset(path, subset, split=split)
        except Exception as error:  # the network, the hub, or the dataset's files
            raise UserError(
                f"the Hugging Face dataset {path} ({'' if subset is None else f'subset {subset}, '}split {split}) "
                f"cannot be loaded: {first_line(error)}; check data.sources[].path, subset and split, and the "
                "connection (there is no local file or folder of this name either)"
            ) from error
    columns = list(rows.column_names)
    chosen = [column for column in columns if column in wanted]
    batches = rows.select_columns(chosen).with_format("arrow").iter(batch_size=1024)
    yield from _arrow_rows(batches, f"{path} ({split})", columns, len(rows))


@contextmanager
def _without_retries(datasets: Any, path: str) -> Iterator[None]:
    """Send the hub one short request; without an answer, use downloaded files only: the retries take a minute."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    settings = [(constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")]
    before = [getattr(module, name) for module, name in settings]
    try:
        if not any(before):
            get_hf_file_metadata(hf_hub_url(path, "README.md", repo_type="dataset"), timeout=_PROBE_TIMEOUT_S)
    except HfHubHTTPError:
        pass  # it answers: `datasets` has the better error
    except Exception:  # the errors of the HTTP client share no base class
        for module, name in settings:
            setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(settings, before, strict=True):
            setattr(module, name, value)
