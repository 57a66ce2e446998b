"""Files outside a run that changed before it is resumed: the base of adapters, and the user's functions."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file

from brorl.config.reading import fixed_settings, make_config
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.runs.checkpoint import INITIAL_STATE, save_checkpoint
from brorl.runs.run_directory import RunDirectory
from brorl.runs.step_record import StepRecord
from brorl.training.run import find_start
from brorl.training.source_files import fingerprints
from each_row import each_row
from run_support import save_tiny_model

SCORE = "def score(response, reference):\n    return 1.0\n"


def nudge(file: Path) -> None:
    weights = load_file(file)
    last = sorted(weights)[-1]
    save_file(weights | {last: weights[last] + 1e-4}, file, metadata={"format": "pt"})


def append(file: Path) -> None:
    file.write_text(file.read_text() + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and files of functions."""
    folder = tmp_path_factory.mktemp("sources")
    save_tiny_model(folder / "base")
    (folder / "mine.py").write_text(SCORE)
    (folder / "brief.py").write_text(SCORE)
    (folder / "package/inner").mkdir(parents=True)
    (folder / "package/__init__.py").write_text("raise RuntimeError('imported')\n")
    (folder / "package/inner/rewards.py").write_text(SCORE)
    return folder


class Begun(NamedTuple):
    """A run with adapters that has a checkpoint."""

    config: TrainConfig
    directory: RunDirectory
    checkpoint: Path


@pytest.fixture(scope="module")
def begun(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Begun]:
    directory, terms = RunDirectory(tmp_path_factory.mktemp("run")), {}
    terms["brief"] = {"function": f"{folder / 'brief.py'}:score"}
    terms["packed"] = {"function": "package.inner.rewards:score"}
    settings = {
        "model": str(folder / "base"),
        "lora.rank": 2,
        "data.sources": [{"path": "unread.jsonl", "domain": "mine"}],
        "verification.functions": {"mine": f"{folder / 'mine.py'}:score"},
        "rewards.terms": terms,
    }

    def save(checkpoint: Path) -> None:
        (checkpoint / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": settings["model"]}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        config = make_config(settings, {}, "test")
        directory.write_begun(fixed_settings(config), False, fingerprints(config, config.model))
        directory.append_metrics(StepRecord(step=0))
        checkpoint = save_checkpoint(directory.checkpoints, INITIAL_STATE, save, Mock())
        directory.note_checkpoint()
        yield Begun(config, directory, checkpoint)


@each_row(
    ("name", "change", "named"),
    [
        ("base/model.safetensors", nudge, "(base model: model.safetensors) has changed"),
        ("base/config.json", append, "(base model: config.json) has changed"),
        ("base/generation_config.json", append, "(base model: generation_config.json) has changed"),
        ("mine.py", append, "(verification.functions.mine) has changed"),
        ("brief.py", append, "(rewards.terms.brief) has changed"),
        ("package/inner/rewards.py", append, "(rewards.terms.packed) has changed"),
        ("package/inner/rewards.py", Path.unlink, "rewards.terms.packed has changed"),
        ("base/tokenizer.json", append, None),  # the checkpoint has its own
    ],
)
def test_a_changed_file_is_named_and_a_run_that_began_with_it_is_not_resumed(
    name: str, change: Callable[[Path], None], named: str | None, folder: Path, begun: Begun
) -> None:
    file = folder / name
    before = file.read_bytes()
    try:
        change(file)
        if named is None:
            assert find_start(begun.config, begun.directory) == begun.checkpoint
            return
        with pytest.raises(UserError) as refusal:
            find_start(begun.config, begun.directory)
    finally:
        file.write_bytes(before)
    assert named in str(refusal.value)
    fix = "since the run began; to resume, restore what step-000000 was trained with, or start a new run: brorl train"
    assert fix in str(refusal.value)


def test_restored_files_are_not_changed(begun: Begun) -> None:
    assert find_start(begun.config, begun.directory) == begun.checkpoint
