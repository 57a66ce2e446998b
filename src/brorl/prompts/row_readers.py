"""Reads rows from a file (JSON Lines, JSON, CSV, TSV, Parquet), a folder or a Hugging Face dataset.

Everything except a JSON array is streamed. Unreadable data raises a `UserError` that names the file and the line.
"""

from __future__ import annotations

import csv
import glob
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from brorl.errors import UserError, first_line, source_setting
from brorl.prompts.arrow import arrow_rows
from brorl.prompts.json_text import JSON_NAMES, json_problem
from brorl.prompts.row import Row
from brorl.storage import is_file, is_folder, split_revision

ROW_FORM = '{"COLUMN": VALUE, ...}'
_PROBE_TIMEOUT_S = 4.0
_COMPRESSED = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}
_SHIPPED = {"products": Path(__file__).with_name("products.jsonl")}  # name -> file; for the recipe `calculator`
_OTHER_SPLITS = ("test", "validation", "valid", "eval", "dev")


def _jsonl_rows(path: Path, wanted: Collection[str] | None) -> Iterator[Row]:
    del wanted  # lines are decoded whole
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            location = f"{path} line {number}"
            text = _decode(raw, location, first=number == 1)
            if not text.strip():
                continue
            try:
                yield _row(json.loads(text.rstrip()), location, number)
            except (ValueError, RecursionError) as error:
                problem = f"is not JSON ({json_problem(error)}); write one object per line, such as {ROW_FORM}"
                yield Row(location, number, "", (), {}, f"{location} {problem}")


def _json_rows(path: Path, wanted: Collection[str] | None) -> Iterator[Row]:
    """Read a list of rows, an object with a single such list (`{"version": "1.1", "data": [...]}`), or JSON Lines."""
    text = _decode(path.read_bytes(), str(path), first=True)
    rows = None
    place = "row"
    try:
        rows = json.loads(text) if text.strip() else []
    except json.JSONDecodeError as error:
        problem, line = error.msg, error.lineno
    except (ValueError, RecursionError) as error:
        problem, line = json_problem(error), 1
    else:
        problem, line = "" if isinstance(rows, list | dict) else "no list", 1
    if isinstance(rows, dict):
        keys = [key for key, value in rows.items() if _is_list_of_rows(value)]
        if len(keys) > 1:
            raise UserError(
                f"{path} is one object with several lists of rows ({', '.join(keys)}); write one of these lists to its "
                "own file"
            )
        place, rows = (f"row of {keys[0]!r}", rows[keys[0]]) if keys else ("row", rows)
    if isinstance(rows, list):
        for number, values in enumerate(rows, 1):
            yield _row(values, f"{path} {place} {number}", number)
    elif text.lstrip().startswith("{") and "\n" not in text.strip():  # a single row
        yield from _jsonl_rows(path, wanted)
    elif isinstance(rows, dict):
        raise UserError(
            f"{path} is one object with the keys {', '.join(rows)[:200]}, and none of them is a list of rows; a .json "
            f"file is a list [{ROW_FORM}, ...], or one object per line"
        )
    elif text.lstrip().startswith("{"):  # many .json files have one row per line
        yield from _jsonl_rows(path, wanted)
    else:
        raise UserError(f"{path} line {line} is not JSON ({problem}); a .json file is a list [{ROW_FORM}, ...]")


_PARTS = {"role", "content", "from", "value", "label", "text", "key", "id", "option"}


def _is_list_of_rows(value: Any) -> bool:
    """Return whether a value is a list of objects that can be rows, rather than a single row's messages or options."""
    return isinstance(value, list) and bool(value) and all(isinstance(x, dict) and {*x} - _PARTS for x in value)


def _table_rows(path: Path, wanted: Collection[str] | None) -> Iterator[Row]:
    """Read CSV or TSV whose first row names the columns. All values remain strings."""
    del wanted  # rows are decoded whole
    with path.open("rb") as file:
        lines = (_decode(raw, f"{path} line {number}", first=number == 1) for number, raw in enumerate(file, 1))
        first = next(lines, "")
        marks = ("\t",) if path.suffix.lower() == ".tsv" else (",", ";", "\t")
        mark = max(marks, key=lambda mark: (first.count(mark), mark == ","))
        rows = csv.reader(chain([first] if first else [], lines), delimiter=mark, strict=True)
        before = csv.field_size_limit(sys.maxsize)
        try:
            columns: list[str] = []
            start = 1
            for values in rows:
                number = start  # line on which the row begins; a quoted value may span lines
                location = f"{path} line {number}"
                start = rows.line_num + 1
                if not columns:
                    columns = [name.strip() for name in values]
                    if repeated := [name for name in columns if columns.count(name) > 1]:
                        raise UserError(
                            f"{path} has two columns named {repeated[0]!r}; its first line must name each column once"
                        )
                elif values:  # a blank line has no values
                    problem = None
                    if len(values) != len(columns):
                        problem = (
                            f"{location} has {len(values)} values for {len(columns)} columns ({', '.join(columns)}); "
                            "put double quotes around a value that contains the separator or a quote"
                        )
                    yield Row(location, number, "", columns, dict(zip(columns, values, strict=False)), problem)
        except csv.Error as error:
            raise UserError(
                f"{path} line {rows.line_num} is not a valid table row ({error}); write a quote inside a value twice"
            ) from error
        finally:
            csv.field_size_limit(before)


def _parquet_rows(path: Path, wanted: Collection[str] | None) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = list(file.schema_arrow.names)
            chosen = [name for name in columns if wanted is None or name in wanted]
            batches = file.iter_batches(batch_size=1024, columns=chosen)
            yield from arrow_rows(batches, str(path), columns, wanted)
    except pyarrow.ArrowException as error:
        raise UserError(f"{path} is not a readable Parquet file ({first_line(error)}); write it again") from error


READERS: dict[str, Callable[[Path, Collection[str] | None], Iterator[Row]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".csv": _table_rows,
    ".tsv": _table_rows,
}
"""Readers by file suffix. A reader takes a file and the wanted columns (None for all)."""


def _decode(raw: bytes, location: str, first: bool) -> str:
    try:
        return raw.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{location} is not UTF-8 text (byte 0x{raw[error.start]:02x} at {error.start + 1}); save the file as UTF-8"
        ) from error


def _row(values: Any, location: str, number: int) -> Row:
    if not isinstance(values, dict):
        problem = f"{location} is {JSON_NAMES[type(values)]}, not an object; write rows such as {ROW_FORM}"
        return Row(location, number, "", (), {}, problem)
    return Row(location, number, "", list(values), values)


def is_local(path: str) -> bool:
    """Return whether `read_rows` reads this path from local files rather than with `datasets`."""
    local = Path(path).expanduser()
    return _is_saved_dataset(local) or _files_of(path, local) is not None


def read_rows(
    path: str, subset: str | None, split: str, wanted: Collection[str] | None, with_bad: bool = False
) -> Iterator[Row]:
    """Read rows in order: files by name, then rows as in the file.

    The path is a file, a folder or a pattern (`*`, `?`, `[...]`, `**`) of files, a folder saved by `datasets`, the name
    of a shipped file, or the id of a dataset on the Hugging Face hub, with or without `@revision`. Files do not have
    subsets or splits. Values of columns that are not `wanted` may be missing; None requests all. An unreadable row is
    an error or, with `with_bad`, a row with a problem.
    """
    local = Path(path).expanduser()
    files = None if _is_saved_dataset(local) else _files_of(path, local)
    if files is None:
        yield from _dataset_rows(path, subset, split, wanted)
        return
    if subset is not None:
        raise UserError(
            f"{path} is not a Hugging Face dataset, so it has no subset {subset!r}; remove {source_setting('subset')}"
        )
    root = local if is_folder(local) else _literal_folder(local)
    for file in files:
        part = file.relative_to(root).as_posix() if len(files) > 1 else ""
        reader = READERS[file.suffix.lower()]
        try:
            for row in reader(file, wanted):
                if row.problem and not with_bad:
                    raise UserError(row.problem)
                yield row._replace(part=part) if part else row
        except OSError as error:
            raise UserError(
                f"{file} cannot be read ({error.strerror or error}); check {source_setting('path')}"
            ) from error


def _files_of(path: str, local: Path) -> list[Path] | None:
    """Return the sorted files that a path refers to; None if the path can only be a hub dataset."""
    if is_file(local):
        if local.suffix.lower() in _COMPRESSED:
            raise UserError(f"{path} is compressed; unpack it first: {_COMPRESSED[local.suffix.lower()]} {path}")
        if local.suffix.lower() not in READERS:
            raise UserError(
                f"brorl does not read the format of {path} (it reads {', '.join(READERS)}); convert it, for instance "
                f"with datasets: load_dataset(...).to_json('{local.stem}.jsonl')"
            )
        return [local]
    if is_folder(local):
        return _files_in(path, local)
    if glob.has_magic(path):
        folder = _literal_folder(local)  # an existing folder may have brackets in its name
        pattern = str(local.relative_to(folder))
        paths = sorted(folder / name for name in glob.glob(pattern, root_dir=folder, recursive=True))  # noqa: PTH207
        files = [file for file in paths if file.is_file() and file.suffix.lower() in READERS]
        if not files:
            raise UserError(
                f"no file matches {path} ({', '.join(READERS)}; working directory {Path.cwd()}); "
                f"fix {source_setting('path')}"
            )
        return files
    if path in _SHIPPED:
        return [_SHIPPED[path]]
    hub_id, _ = split_revision(path)
    if local.suffix.lower() in (*READERS, *_COMPRESSED, ".txt") or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", hub_id):
        raise UserError(
            f"there is no file or folder {path} (working directory {Path.cwd()}); fix {source_setting('path')} "
            "(the id of a Hugging Face dataset looks like openai/gsm8k)"
        )
    return None


def _literal_folder(pattern: Path) -> Path:
    """Return the folder at the start of a pattern: all leading parents that have no wildcards, or exist as named."""
    folder = Path(*pattern.parts[:1]) if pattern.is_absolute() else Path()
    for name in pattern.parts[len(folder.parts) : -1]:
        if glob.has_magic(name) and not is_folder(folder / name):
            break
        folder /= name
    return folder


def _files_in(path: str, folder: Path) -> list[Path]:
    """Return all files under a folder. Files from several splits are an error."""
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.suffix.lower() in READERS
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )
    if not files:
        raise UserError(
            f"the folder {path} does not contain any {', '.join(READERS)} file; fix {source_setting('path')}"
        )
    names = [file.relative_to(folder).as_posix() for file in files]
    train_files = [name for name in names if re.search(r"(?<![a-z])train(?![a-z])", name.lower())]
    test_files = [name for name in names if re.search(rf"(?<![a-z])({'|'.join(_OTHER_SPLITS)})(?![a-z])", name.lower())]
    if train_files and test_files:
        raise UserError(
            f"the folder {path} contains several splits ({train_files[0]}, {test_files[0]}); name the files to train "
            f"on, such as {source_setting('path', folder / train_files[0])}"
        )
    return files


def _is_saved_dataset(folder: Path) -> bool:
    return is_file(folder / "dataset_dict.json") or (
        is_file(folder / "state.json") and is_file(folder / "dataset_info.json")
    )


def _dataset_rows(path: str, subset: str | None, split: str, wanted: Collection[str] | None) -> Iterator[Row]:
    """Read a hub dataset, or a folder saved by `datasets`."""
    local = Path(path).expanduser()
    is_saved = _is_saved_dataset(local)
    try:
        import datasets
    except ImportError as error:
        what = "a folder of" if is_saved else "not a file here but may be a Hugging Face dataset, which needs"
        raise UserError(f"{path} is {what} the datasets package; run: pip install 'brorl[datasets]'") from error
    try:
        if is_saved:
            rows = datasets.load_from_disk(str(local))
        else:
            hub_id, revision = split_revision(path)
            with _without_retries(datasets, hub_id):
                rows = datasets.load_dataset(hub_id, subset, split=split, revision=revision)
    except Exception as error:  # the network, the hub, or the dataset's files
        if is_saved:
            raise UserError(f"the dataset in {path} cannot be read ({first_line(error)}); save it again") from error
        raise UserError(
            f"the Hugging Face dataset {path} ({'' if subset is None else f'subset {subset}, '}split {split}) "
            f"cannot be loaded: {first_line(error)}; check {source_setting('path')}, subset and split, and the "
            "connection (there is no local file or folder with this name either)"
        ) from error
    if isinstance(rows, datasets.DatasetDict):
        if split not in rows:
            raise UserError(
                f"{path} has no split {split!r} (splits: {', '.join(rows)}); set {source_setting('split')}, or "
                f"{source_setting('path', local / next(iter(rows)))}"
            )
        rows = rows[split]
    columns = list(rows.column_names)
    chosen = [column for column in columns if wanted is None or column in wanted] or columns[:1]
    batches = rows.select_columns(chosen).with_format("arrow").iter(batch_size=1024)
    yield from arrow_rows(batches, f"{path} ({split})", columns, wanted)


@contextmanager
def _without_retries(datasets: Any, path: str) -> Iterator[None]:
    """Send the hub one short request. If it does not answer, use only downloaded files, since retries take a minute."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    settings = [(constants, "HF_HUB_OFFLINE"), (datasets.config, "HF_HUB_OFFLINE")]
    before = [getattr(module, name) for module, name in settings]
    try:
        if not any(before):
            get_hf_file_metadata(hf_hub_url(path, "README.md", repo_type="dataset"), timeout=_PROBE_TIMEOUT_S)
    except HfHubHTTPError:
        pass  # the hub answered, and `datasets` gives a better error
    except Exception:  # the errors of the HTTP client share no base class
        for module, name in settings:
            setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(settings, before, strict=True):
            setattr(module, name, value)
