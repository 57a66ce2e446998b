"""Rows of a file, a folder or a Hugging Face dataset, one after the other, each with its location.

`row_files` reads one file. What is no data here, and no dataset of the hub, is a `UserError` of one line.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from brorl.errors import UserError, first_line
from brorl.paths import is_file, is_folder, split_revision
from brorl.prompts.row_files import READERS, Row, arrow_rows, read_arrow_files
from brorl.wording import of_source

_PROBE_TIMEOUT_S = 4.0
_SUFFIXES = tuple(READERS)
_OTHER_SPLITS = ("test", "validation", "valid", "eval", "dev")


def is_local(path: str) -> bool:
    """Return whether rows are read from files here, not with `datasets`; the path is as in `read_rows`.

    Raises:
        UserError: If there are no such files, and it cannot be a dataset of the hub.
    """
    local = Path(path).expanduser()
    return _is_saved_data_set(local) or _files_of(path, local) is not None


def read_rows(path: str, subset: str | None, split: str, wanted: Collection[str]) -> Iterator[Row]:
    """Read rows in order: files by name, then rows as in the file.

    Args:
        path: A file (`.jsonl`, `.json`, `.parquet`, `.csv`, `.tsv`, `.arrow`), a folder or a pattern (`*`, `?`,
            `[...]`, `**`) of such files, a folder that `datasets` saved, or the id of a dataset on the Hugging Face
            hub, with or without `@revision`.
        subset: Configuration of a hub dataset.
        split: Split of a dataset; ignored for files.
        wanted: The columns that are used; the values of others can be missing.

    Raises:
        UserError: If there is no such data, or it cannot be read.
    """
    local = Path(path).expanduser()
    if _is_saved_data_set(local):
        yield from _saved_rows(local, split, wanted)
        return
    files = _files_of(path, local)
    if files is None:
        yield from _data_set_rows(path, subset, split, wanted)
        return
    if subset is not None:
        raise UserError(
            f"{path} is not a Hugging Face dataset, so it has no subset {subset!r}; remove {of_source('subset')}"
        )
    wild = [i for i, part in enumerate(local.parts) if glob.has_magic(part)]
    root = local if is_folder(local) else Path(*local.parts[: wild[0]]) if wild else local.parent
    for file in files:
        part = file.relative_to(root).as_posix() if len(files) > 1 else ""
        reader = READERS[file.suffix.lower()]
        try:
            for row in reader(file, wanted):
                yield row._replace(part=part) if part else row
        except OSError as error:
            raise UserError(f"{file} cannot be read ({error.strerror or error}); check {of_source('path')}") from error


def _files_of(path: str, local: Path) -> list[Path] | None:
    """Return the files of a path, sorted; None if it can only be a dataset of the hub."""
    if is_file(local):
        if local.suffix.lower() not in _SUFFIXES:
            raise UserError(
                f"{path} is not a file that brorl reads ({', '.join(_SUFFIXES)}); convert it, for instance with "
                f"datasets: load_dataset(...).to_json('{local.stem}.jsonl')"
            )
        return [local]
    if is_folder(local):
        return _files_in(path, local)
    if glob.has_magic(path):
        # Path.glob rejects absolute patterns.
        found = sorted(Path(name) for name in glob.glob(str(local), recursive=True))  # noqa: PTH207
        files = [file for file in found if file.is_file() and file.suffix.lower() in _SUFFIXES]
        if not files:
            raise UserError(
                f"no file matches {path} ({', '.join(_SUFFIXES)}; working folder {Path.cwd()}); fix {of_source('path')}"
            )
        return files
    hub_id, _ = split_revision(path)
    if local.suffix.lower() in (*_SUFFIXES, ".txt", ".gz") or not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", hub_id):
        raise UserError(
            f"there is no file or folder {path} (working folder {Path.cwd()}); fix {of_source('path')} "
            "(the id of a Hugging Face dataset looks like openai/gsm8k)"
        )
    return None


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
        raise UserError(f"the folder {path} contains no {', '.join(_SUFFIXES)} file; fix {of_source('path')}")
    names = [file.relative_to(folder).as_posix() for file in files]
    train_files = [name for name in names if re.search(r"(?<![a-z])train(?![a-z])", name.lower())]
    test_files = [name for name in names if re.search(rf"(?<![a-z])({'|'.join(_OTHER_SPLITS)})(?![a-z])", name.lower())]
    if train_files and test_files:
        raise UserError(
            f"the folder {path} contains several splits ({train_files[0]}, {test_files[0]}); name the files to train "
            f"on, such as {of_source('path', folder / train_files[0])}"
        )
    return files


def _is_saved_data_set(folder: Path) -> bool:
    return is_file(folder / "dataset_dict.json") or (
        is_file(folder / "state.json") and is_file(folder / "dataset_info.json")
    )


def _saved_rows(folder: Path, split: str, wanted: Collection[str]) -> Iterator[Row]:
    """Read a folder that `datasets` saved; its shards are one table."""
    where = folder
    try:
        if is_file(folder / "dataset_dict.json"):
            splits = json.loads((folder / "dataset_dict.json").read_text("utf-8"))["splits"]
            if split not in splits:
                raise UserError(
                    f"{folder} has no split {split!r} (splits: {', '.join(splits)}); set {of_source('split')}, or "
                    f"{of_source('path', folder / splits[0])}"
                )
            where = folder / split
        state = json.loads((where / "state.json").read_text("utf-8"))
        files = [where / str(file["filename"]) for file in state["_data_files"]]
        if state.get("_indices_data_files"):  # of old versions: the rows are others than those of the files
            raise ValueError("it has the format of an old version of datasets")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"the dataset in {folder} cannot be read ({first_line(error)}); save it again") from error
    yield from read_arrow_files(files, f"{folder} ({split})", wanted)


def _data_set_rows(path: str, subset: str | None, split: str, wanted: Collection[str]) -> Iterator[Row]:
    """Read a dataset of the hub."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{path} is not a file here but may be a Hugging Face dataset, which needs the datasets package; "
            "run: pip install 'brorl[datasets]'"
        ) from error
    try:
        hub_id, revision = split_revision(path)
        pinned = {} if revision is None else {"revision": revision}
        with _without_retries(datasets, hub_id):
            rows = datasets.load_dataset(hub_id, subset, split=split, **pinned)
    except Exception as error:  # the network, the hub, or the dataset's files
        raise UserError(
            f"the Hugging Face dataset {path} ({'' if subset is None else f'subset {subset}, '}split {split}) "
            f"cannot be loaded: {first_line(error)}; check {of_source('path')}, subset and split, and the "
            "connection (there is no local file or folder of this name either)"
        ) from error
    columns = list(rows.column_names)
    chosen = [column for column in columns if column in wanted] or columns[:1]
    batches = rows.select_columns(chosen).with_format("arrow").iter(batch_size=1024)
    yield from arrow_rows(batches, f"{path} ({split})", columns, wanted)


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
