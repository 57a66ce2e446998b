"""Checkpoints: Hugging Face folders that also contain the trainer's state.

A checkpoint is written under a temporary name and flushed to disk; it then gets a COMMIT file and finally its real
name. So a kill at any instant leaves earlier checkpoints intact, and nothing half-written looks complete. COMMIT
contains the step and the size and CRC-32 of every file. Only the model card may be edited.

A run that trains adapters saves only the adapters, in peft's format, with the name of their base. A learner with
several ranks writes its optimizer and reference as shards, one file per rank, to a subfolder. `best` is a link to the
checkpoint with the best evaluation, or a file with its name where links are not supported. This checkpoint is never
deleted.
"""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase

from brorl.algorithms.groups import Group
from brorl.errors import StorageError, UserError
from brorl.format import shell_command
from brorl.prompts.prompt import Prompt
from brorl.storage import followed, optional, point_at, remedy, size_and_sum, storage_errors, to_disk
from brorl.tree import ARRAY_DTYPES, RolloutTree

SHARDS = "shards"  # key in a learner's state, and the subfolder that several ranks write
EMA = "ema"  # subfolder with the averaged weights, if any
CARD = "README.md"  # the model card, which the user may edit
_COMMIT = "COMMIT"
_NOT_REGULAR = " saved for being the best"  # on COMMIT's first line
_STATE = "trainer_state.pt"
FOR_RESUMING = (_COMMIT, _STATE, SHARDS)  # read only by `brorl resume`
_BEST = "best"


class CollectorState(NamedTuple):
    """Everything that a collector needs to resume as if it had never stopped."""

    stream: dict[str, Any] | None = None  # position of the prompt stream; None at the start of a run
    carried: tuple[Group, ...] = ()  # groups that were sampled but not trained on
    attempts: int = 0  # attempts at the next step that found no mixed group
    ahead: dict[str, Any] | None = None  # backlog of an asynchronous collector as plain values, otherwise None
    # (kept, sampled): groups that earlier steps kept and sampled, with more weight on recent steps
    seen: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class TrainerState:
    """Everything except the weights that a run needs to resume as if it had never stopped."""

    step: int  # number of steps done
    learner: dict[str, Any] | None  # the learner's optimizer and number of updates; None at the start
    collector: CollectorState = field(default_factory=CollectorState)
    held_out: str | None = None  # fingerprint of the held-out prompts; None if there are none


INITIAL_STATE = TrainerState(step=0, learner=None)


def save_checkpoint(
    folder: Path,
    state: TrainerState,
    save: Callable[[Path], object],
    tokenizer: PreTrainedTokenizerBase,
    keep: int = 0,
    best_step: int | None = None,
    regular: bool = True,
) -> Path:
    """Write a checkpoint: the model (`save` writes it to the folder that it receives), the tokenizer, and the state.

    Once it is complete, older checkpoints are deleted, except for the newest `keep` regular ones (0 keeps all) and the
    one from `best_step`. A checkpoint saved only because it is the best is not regular. An error leaves earlier
    checkpoints intact.
    """
    target = folder / f"step-{state.step:06d}"
    if is_checkpoint(target) and not state.collector.attempts:
        return target  # already saved, and nothing has changed since
    temporary = folder / f".{target.name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save(temporary)
        for weights_folder in (temporary, temporary / EMA):
            if weights_folder.is_dir():
                tokenizer.save_pretrained(weights_folder)
        with (temporary / _STATE).open("wb") as file:
            torch.save(_to_plain(state), file)  # an open file avoids a copy
        readable = temporary.stat().st_mode & 0o666  # safetensors writes files that only their owner can read
        written = sorted(temporary.rglob("*"))
        for path in written:
            if path.is_file():
                with optional("permissions", folder, "checkpoint files may be readable only by their owner"):
                    path.chmod(readable)
            to_disk(path)
        files = [path for path in written if path.is_file() and path.name != CARD]
        sums = "".join(f"{size_and_sum(path)} {path.relative_to(temporary).as_posix()}\n" for path in files)
        commit = temporary / f"{_COMMIT}.tmp"
        commit.write_text(f"step {state.step}{'' if regular else _NOT_REGULAR}\n{sums}")
        to_disk(commit)
        commit.rename(temporary / _COMMIT)
        to_disk(temporary)
        _publish(temporary, target)
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, RuntimeError) and not isinstance(_cause(error), OSError):
            raise  # not a disk error: out of memory, or a lost rank
        last = last_checkpoint(folder)
        cause = _cause(error)
        what_to_do = remedy(cause) if isinstance(cause, OSError) else "check the file system"
        raise StorageError(
            f"could not write checkpoint {target} ({cause}); the last complete one is {last or 'none'}; {what_to_do}, "
            f"then: {shell_command('resume', folder.parent)}"
        ) from error
    if keep:
        with storage_errors(folder):
            _delete_old(folder, keep, {state.step, best_step})
    return target


def _cause(error: BaseException) -> BaseException:
    """Return the OSError that caused an error, if any: torch.save wraps it in an error about file positions."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return cause or error


def _publish(complete: Path, target: Path) -> None:
    """Give a checkpoint its final name, replacing one of the same step. After a kill, `discard_unfinished` finishes."""
    if is_checkpoint(target):
        (target / _COMMIT).unlink()
        shutil.rmtree(target)
    complete.rename(target)
    to_disk(target.parent)


def _delete_old(folder: Path, keep: int, kept_steps: Collection[int | None]) -> None:
    """Delete all checkpoints except the newest `keep` regular ones and those of `kept_steps`."""
    complete = complete_checkpoints(folder)
    regular = [c for c in complete if not (c / _COMMIT).read_text("utf-8").partition("\n")[0].endswith(_NOT_REGULAR)]
    for old in complete:
        if old not in regular[-keep:] and _step_of(old) not in kept_steps:
            (old / _COMMIT).unlink()
            shutil.rmtree(old)


def mark_best(folder: Path, step: int) -> None:
    """Atomically point `best` at a step's checkpoint, if it is complete (step 0 never has one)."""
    target = folder / f"step-{step:06d}"
    if is_checkpoint(target):
        with storage_errors(folder):
            point_at(folder / _BEST, target.name)


def best_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint that `best` points at, or None."""
    checkpoint = followed(folder / _BEST)
    return checkpoint if is_checkpoint(checkpoint) else None


def complete_checkpoints(folder: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    folders = [path.parent for path in folder.glob(f"step-*/{_COMMIT}") if _step_of(path.parent) is not None]
    return sorted(folders, key=lambda path: _step_of(path) or 0)


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, or None."""
    complete = complete_checkpoints(folder)
    return complete[-1] if complete else None


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder, or the target of a link, is a complete brorl checkpoint."""
    return (folder / _COMMIT).is_file() and (folder / _STATE).is_file()


def read_step(checkpoint: Path) -> int:
    """Return the step of a complete checkpoint without reading its state."""
    return int((checkpoint / _COMMIT).read_text().split()[1])


def find_damage(checkpoint: Path) -> str | None:
    """Read all files of a complete checkpoint. Return what has changed since it was written, or None."""
    for line in (checkpoint / _COMMIT).read_text("utf-8").splitlines()[1:]:
        size, crc, name = line.split(" ", 2)
        file = checkpoint / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != int(size):
            return f"{name} has {file.stat().st_size:,} bytes, not {int(size):,}"
        if size_and_sum(file) != f"{size} {crc}":
            return f"the content of {name} has changed since it was written"
    return None


def read_state(checkpoint: Path) -> TrainerState:
    """Read a checkpoint's state for a different run, without restoring torch's random state."""
    return _state_from(_read_plain(checkpoint), checkpoint)


def load_state(checkpoint: Path) -> TrainerState:
    """Read a checkpoint's state, and restore torch's random state."""
    plain = _read_plain(checkpoint)
    torch.set_rng_state(plain["torch_rng"])
    for device, state in enumerate(plain["cuda_rng"][: torch.cuda.device_count()]):  # there may be fewer devices now
        torch.cuda.set_rng_state(state, device)
    return _state_from(plain, checkpoint)


def _read_plain(checkpoint: Path) -> dict[str, Any]:
    if not is_checkpoint(checkpoint):
        raise UserError(f"{checkpoint} is not a complete checkpoint (no {_COMMIT} file); choose a different one")
    try:
        plain: dict[str, Any] = torch.load(checkpoint / _STATE, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise UserError(f"{checkpoint / _STATE} is damaged ({str(error).splitlines()[0]})") from error
    return plain


def _state_from(plain: dict[str, Any], checkpoint: Path) -> TrainerState:
    learner = plain["learner"]
    if learner is not None and SHARDS in learner:  # the checkpoint may have been moved
        learner = learner | {SHARDS: str((checkpoint / learner[SHARDS]).absolute())}
    carried = tuple(map(_group_from, plain["carried"]))
    collector = CollectorState(plain["stream"], carried, plain["attempts"], plain["ahead"], tuple(plain["seen"]))
    return TrainerState(plain["step"], learner, collector, plain["held_out"])


def discard_unfinished(folder: Path) -> None:
    """Clean up after a killed process: give complete checkpoints their final names, and delete unfinished files."""
    for temporary in folder.glob(f".step-*.tmp/{_COMMIT}"):
        target = folder / temporary.parent.name.removeprefix(".").removesuffix(".tmp")
        if not is_checkpoint(target):
            shutil.rmtree(target, ignore_errors=True)
            _publish(temporary.parent, target)
    for path in [
        *folder.glob(".step-*.tmp"),
        *(p for p in folder.glob("step-*") if _step_of(p) is not None and not (p / _COMMIT).exists()),
    ]:
        shutil.rmtree(path)
    (folder / f".{_BEST}.tmp").unlink(missing_ok=True)
    if not (folder / _BEST).is_dir() and best_checkpoint(folder) is None:
        (folder / _BEST).unlink(missing_ok=True)


def _step_of(folder: Path) -> int | None:
    name = re.fullmatch(r"step-(\d+)", folder.name)
    return int(name[1]) if name and folder.is_dir() else None


def _to_plain(state: TrainerState) -> dict[str, Any]:
    """Return the state as tensors, numbers and strings only, so loading it executes no code."""
    collector = state.collector
    nested = {"learner": state.learner, "stream": collector.stream, "ahead": collector.ahead}
    for name, value in nested.items():
        _check_plain(value, name)
    return {
        **nested,
        "held_out": state.held_out,
        "attempts": collector.attempts,
        "seen": collector.seen,
        "step": state.step,
        "carried": [_group_to(g) for g in collector.carried],
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _check_plain(key, f"a key of {where}")
            _check_plain(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif type(value) not in (bool, int, float, str, type(None), torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"{where} is a {type(value).__name__}; a checkpoint stores only tensors, numbers, strings, lists and dicts"
        )


def _group_to(group: Group) -> dict[str, Any]:
    return {
        "prompt": {**asdict(group.prompt), "token_ids": list(group.prompt.token_ids)},
        "tree": {name: _tensor(getattr(group.tree, name)) for name in ARRAY_DTYPES},
        "correct_L": _tensor(group.correct_L),
        "reward_L": _tensor(group.reward_L),
        "old_logprob_M": None if group.old_logprob_M is None else _tensor(group.old_logprob_M),
        "version": group.version,
    }


def _group_from(plain: dict[str, Any]) -> Group:
    """Return a group from the plain values of `_group_to`."""
    prompt = Prompt(**{**plain["prompt"], "token_ids": tuple(plain["prompt"]["token_ids"])})
    arrays = {name: tensor.numpy() for name, tensor in plain["tree"].items()}
    tree = RolloutTree(prompt_ids=prompt.token_ids, **arrays)
    old = plain["old_logprob_M"]
    return Group(
        prompt,
        tree,
        plain["correct_L"].numpy(),
        plain["reward_L"].numpy(),
        None if old is None else old.numpy(),
        plain["version"],
    )


def _tensor(array: np.ndarray[Any, Any] | Sequence[float]) -> torch.Tensor:
    return torch.tensor(np.asarray(array))
