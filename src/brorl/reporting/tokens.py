"""The texts of tokens in a stored run, by the tokenizer of its checkpoint, or of its model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from brorl.model.settings import shipped_folder
from brorl.runs.run_directory import read_settings
from brorl.storage import split_revision

TokenText = Callable[[int], tuple[str, bool]]  # the text that a token adds, and whether the token is special
_FILE = "tokenizer.json"


def tokenizer_of_run(run: Path) -> Any:
    """Return the tokenizer of a run's last checkpoint, or of its model before the first checkpoint.

    None if this machine has neither, or it cannot be read.
    """
    checkpoints = sorted((run / "checkpoints").glob(f"*/{_FILE}"))
    file = checkpoints[-1] if checkpoints else _file_of(read_settings(run / "config.yaml").get("model", ""))
    if file is None or not file.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises a bare Exception for an unreadable file
        return None


def _file_of(model: str) -> Path | None:
    """Return the file in a model's folder, or the downloaded file of a hub id."""
    folder = shipped_folder(model) or Path(model).expanduser()
    if not model or folder.is_dir():
        return folder / _FILE if model else None
    from huggingface_hub import try_to_load_from_cache

    hub_id, revision = split_revision(model)
    file: Any = None
    with suppress(ValueError):  # a deleted folder is not a hub id
        file = try_to_load_from_cache(hub_id, _FILE, revision=revision)
    return Path(file) if isinstance(file, str) else None


def token_text(tokenizer: Any) -> TokenText:
    """Return a function from a token to its text; without a tokenizer the text is the token's id."""

    @cache
    def text_of(token: int) -> tuple[str, bool]:
        if tokenizer is None or tokenizer.id_to_token(token) is None:
            return f"[{token}]", False
        # A single token may lose its leading space. The text that a second copy adds keeps it.
        once, twice = (tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        added = tokenizer.get_added_tokens_decoder().get(token)
        return twice[len(once) :] if twice.startswith(once) else once, bool(added and added.special)

    return text_of
