"""The text of tokens in a stored run, from the tokenizer of its checkpoint or its model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from brorl.model.settings import shipped_folder
from brorl.runs.run_directory import read_settings
from brorl.storage import split_revision

TokenText = Callable[[int], tuple[str, bool]]  # token -> (text that it adds, whether it is special)
_FILE = "tokenizer.json"


def tokenizer_of_run(run: Path) -> Any:
    """Return the tokenizer of a run's last checkpoint, or of its model if there is no checkpoint yet.

    None if this machine has neither or the file cannot be read.
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
    """Return the tokenizer file in a model's folder, or the downloaded one for a hub id."""
    folder = shipped_folder(model) or Path(model).expanduser()
    if not model or folder.is_dir():
        return folder / _FILE if model else None
    from huggingface_hub import try_to_load_from_cache

    hub_id, revision = split_revision(model)
    file: Any = None
    with suppress(ValueError):  # the path of a deleted folder is not a hub id
        file = try_to_load_from_cache(hub_id, _FILE, revision=revision)
    return Path(file) if isinstance(file, str) else None


def token_text(tokenizer: Any) -> TokenText:
    """Return a function from token to text; without a tokenizer, the text is the token id."""

    @cache
    def text_of(token: int) -> tuple[str, bool]:
        if tokenizer is None or tokenizer.id_to_token(token) is None:
            return f"[{token}]", False
        # Decoding may strip a leading space from the first token, so take the text added by a second copy.
        once, twice = (tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        added = tokenizer.get_added_tokens_decoder().get(token)
        return twice[len(once) :] if twice.startswith(once) else once, bool(added and added.special)

    return text_of
