"""Checkpoints hold everything, load with transformers, and are complete or absent."""

import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from brorl.algorithms.groups import Group
from brorl.errors import StorageError, UserError
from brorl.prompts.prompt import Prompt
from brorl.runs.checkpoint import (
    INITIAL_STATE,
    CollectorState,
    TrainerState,
    best_checkpoint,
    complete_checkpoints,
    discard_unfinished,
    find_damage,
    is_checkpoint,
    last_checkpoint,
    load_state,
    mark_best,
    read_state,
    read_step,
    save_checkpoint,
)
from brorl.tree import RolloutTree
from run_support import assert_identical, save_tiny_model
from tree_invariants import check_tree


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(source: Path) -> LlamaForCausalLM:
    """The model after some training: every weight differs from those it was loaded with."""
    model = AutoModelForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture
def tokenizer(source: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(source)


@pytest.fixture
def save(tmp_path: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> Callable[..., Path]:
    """Saves a state with the model; `write` writes it in another way."""

    def saved(
        state: TrainerState, *options: int, write: Callable[[Path], object] = model.save_pretrained, **more: object
    ) -> Path:
        return save_checkpoint(tmp_path, state, write, tokenizer, *options, **more)

    return saved


def group(seed: int) -> Group:
    chance = np.random.default_rng(seed)
    responses = [chance.integers(3, 6, chance.integers(1, 5)).tolist() for _ in range(12)]
    logprobs = [[-1 / 3 - token / 7 for token in r] for r in responses]
    tree = RolloutTree.from_responses((3, 4, 5), responses, logprobs, [len(r) < 4 for r in responses])
    correct = chance.random(tree.num_responses) < 0.5
    prompt = Prompt(f"id {seed}", "1 2:", (3, 4, 5), "1 2 -> 3", "countdown", f"source {seed}", "1 2?")
    assert all(getattr(prompt, field.name) for field in fields(prompt))  # none has its default
    return Group(prompt, tree, correct, correct / 3)


def state_after(step: int) -> TrainerState:
    learner = {
        "optimizer": {"state": {0: {"exp_avg": torch.full((3,), 1 / 3)}}, "param_groups": [{"betas": (0.9, 0.95)}]},
        "updates": 4 * step,
        "reference": [torch.full((2, step), 1 / 7), torch.arange(3, dtype=torch.int16)],
        "max_nodes": None,
    }
    waited = group(step + 1)
    chance = np.random.default_rng(step)
    waited = replace(
        waited,
        old_logprob_M=chance.normal(size=waited.tree.num_unique_tokens),
        version=step,
    )
    stream = {"epoch": 1, "position": step}
    collector = CollectorState(stream, (group(step), waited), seen=(step / 3, step / 0.7))
    return TrainerState(step, learner, collector, held_out=f"fingerprint {step}")


def test_checkpoints_that_were_only_the_best_take_no_slot(tmp_path: Path, save: Callable[..., Path]) -> None:
    """A regular one every 4 steps, two of which are kept; each odd step is a new best, and so is step 8."""
    kept = {
        3: [3],
        4: [3, 4],
        5: [4, 5],
        7: [4, 7],
        8: [4, 8],
        9: [4, 8, 9],
        11: [4, 8, 11],
        12: [8, 11, 12],
        16: [11, 12, 16],
    }
    best = 0
    for step, steps in kept.items():
        best = step if step % 2 or step == 8 else best
        save(state_after(step), 2, best, regular=step % 4 == 0)
        assert [read_step(folder) for folder in complete_checkpoints(tmp_path)] == steps


def test_loads_with_transformers_as_the_trained_model(
    source: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, save: Callable[..., Path]
) -> None:
    folder = save(INITIAL_STATE)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    original = AutoModelForCausalLM.from_pretrained(source)
    for (name, ours), theirs, before in zip(
        loaded.named_parameters(), model.parameters(), original.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
        assert not torch.equal(ours, before), name
    ids = torch.tensor([tokenizer("1 2 -> 3:")["input_ids"]])
    # Two places in memory: matrix products of some processors round by the address.
    torch.testing.assert_close(loaded.eval()(ids).logits, model.eval()(ids).logits)
    again = AutoTokenizer.from_pretrained(folder)
    assert again("1 2 -> 3:")["input_ids"] == ids[0].tolist()
    assert again.decode(ids[0]) == "1 2 -> 3:"
    assert again.eos_token_id == tokenizer.eos_token_id


def test_state_comes_back_exactly(save: Callable[..., Path]) -> None:
    state = state_after(7)
    with torch.random.fork_rng():
        folder = save(state)
        expected_draws = torch.rand(5)
        torch.rand(100)
        restored = load_state(folder)
        assert torch.equal(torch.rand(5), expected_draws)
    assert (restored.step, restored.held_out) == (state.step, state.held_out)
    assert (restored.collector.stream, restored.collector.seen) == (state.collector.stream, state.collector.seen)
    assert_identical(restored.learner, state.learner)
    assert len(restored.collector.carried) == 2
    for ours, theirs in zip(restored.collector.carried, state.collector.carried, strict=True):
        assert ours.prompt == theirs.prompt
        check_tree(ours.tree)
        for name in ("token", "parent", "count", "logprob", "leaf", "leaf_count", "finished"):
            assert_identical(torch.tensor(getattr(ours.tree, name)), torch.tensor(getattr(theirs.tree, name)), name)
        assert ours.correct_L.tolist() == theirs.correct_L.tolist()
        assert ours.reward_L.tobytes() == theirs.reward_L.tobytes()
        assert ours.version == theirs.version
    fresh, waited = (g.old_logprob_M for g in restored.collector.carried)
    assert fresh is None
    assert waited is not None
    assert waited.tobytes() == state.collector.carried[1].old_logprob_M.tobytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_best_is_kept_and_linked(tmp_path: Path, model: LlamaForCausalLM, save: Callable[..., Path]) -> None:
    assert best_checkpoint(tmp_path) is None
    for step, best in ((2, 2), (4, 2), (6, 2), (8, 8), (10, 8)):
        save(state_after(step), keep=1, best_step=best)
        mark_best(tmp_path, best)
        assert (tmp_path / "best").readlink() == Path(f"step-{best:06d}")  # relative: a run can be moved
        assert best_checkpoint(tmp_path) == tmp_path / f"step-{best:06d}"
        assert names(tmp_path) == ["best", *sorted({f"step-{best:06d}", f"step-{step:06d}"})]
    mark_best(tmp_path, 0)
    assert (tmp_path / "best").readlink() == Path("step-000008")
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000008", "step-000010"]
    assert load_state(tmp_path / "best").step == read_step(tmp_path / "best") == 8
    assert is_checkpoint(tmp_path / "best")
    assert not is_checkpoint(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "best").lm_head.weight, model.lm_head.weight)


def test_a_link_to_nothing_is_discarded(tmp_path: Path, save: Callable[..., Path]) -> None:
    save(state_after(2))
    (tmp_path / ".best.tmp").symlink_to("step-000002")  # of a kill before the link was renamed
    mark_best(tmp_path, 2)
    (tmp_path / ".best.tmp").symlink_to("step-000002")
    discard_unfinished(tmp_path)
    assert names(tmp_path) == ["best", "step-000002"]
    (tmp_path / "step-000002/COMMIT").unlink()
    assert best_checkpoint(tmp_path) is None
    discard_unfinished(tmp_path)
    assert names(tmp_path) == []


def test_random_numbers_are_restored_on_the_devices_that_exist(
    save: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [torch.tensor([number], dtype=torch.uint8) for number in range(3)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states)
    folder = save(state_after(3))
    for num_devices in (0, 1, 3, 5):
        restored: dict[int, torch.Tensor] = {}
        monkeypatch.setattr(torch.cuda, "device_count", lambda n=num_devices: n)
        monkeypatch.setattr(
            torch.cuda, "set_rng_state", lambda state, device, into=restored: into.update({device: state})
        )
        load_state(folder)
        assert_identical(list(restored.items()), list(enumerate(states[:num_devices])))


def test_another_runs_state_is_read_without_restoring_random_numbers(save: Callable[..., Path]) -> None:
    folder = save(state_after(3))
    torch.rand(3)
    before = torch.get_rng_state()
    assert_identical(read_state(folder).learner, state_after(3).learner)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("learner", "where"),
    [
        ({"a": [1, {"b": np.float64(1)}]}, r"learner.a\[1\].b is a float64"),
        ({"a": np.zeros(2)}, "learner.a is a ndarray"),
        ({np.int64(1): 2}, "a key of learner is a int64"),
    ],
)
def test_a_state_that_could_not_be_loaded_is_not_saved(
    tmp_path: Path, save: Callable[..., Path], learner: dict, where: str
) -> None:
    with pytest.raises(TypeError, match=f"{where}; a checkpoint stores only tensors"):
        save(TrainerState(2, learner))
    assert last_checkpoint(tmp_path) is None


@pytest.mark.linux
def test_a_large_state_is_written_without_a_copy(tmp_path: Path, save: Callable[..., Path]) -> None:
    large = torch.ones(64 << 18)  # 64 MiB
    Path("/proc/self/clear_refs").write_text("5")  # the peak becomes the memory in use now
    before = peak_bytes()
    save(TrainerState(2, {"moments": large}))
    assert peak_bytes() - before < large.nbytes / 2
    assert (tmp_path / "step-000002/trainer_state.pt").stat().st_size > large.nbytes


def peak_bytes() -> int:
    """Most memory that this process has had."""
    line = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert line is not None
    return int(line[1]) * 1024


def test_folder_without_commit_is_ignored_and_discarded(tmp_path: Path, save: Callable[..., Path]) -> None:
    assert last_checkpoint(tmp_path) is None
    good = save(state_after(2))
    torn = save(state_after(4))
    (torn / "COMMIT").unlink()
    half_written = tmp_path / ".step-000006.tmp"
    half_written.mkdir()
    (half_written / "model.safetensors").write_bytes(b"half")

    assert complete_checkpoints(tmp_path) == [good]
    assert last_checkpoint(tmp_path) == good
    with pytest.raises(UserError, match="not a complete checkpoint"):
        load_state(torn)
    discard_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == [good]
    assert last_checkpoint(save(state_after(4)).parent) == torn


def test_complete_checkpoint_is_not_written_twice(save: Callable[..., Path]) -> None:
    folder = save(state_after(2))
    before = {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.iterdir()}
    assert save(state_after(2)) == folder
    assert {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.iterdir()} == before


def test_failure_to_write_names_the_last_good_checkpoint(tmp_path: Path, save: Callable[..., Path]) -> None:
    """The name of the next checkpoint is taken by a folder that is in use, so that it cannot be renamed to it."""
    good = save(state_after(2))
    (tmp_path / "step-000004").mkdir()
    (tmp_path / "step-000004/foreign").write_text("not ours")
    with pytest.raises(StorageError, match=r"could not write checkpoint .*step-000004.*last complete one is .*000002"):
        save(state_after(4))
    assert last_checkpoint(tmp_path) == good
    assert load_state(good).step == 2
    assert not list(tmp_path.glob(".*"))


class WithShards:
    """A model whose ranks write shards beside it."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model = model

    def save_pretrained(self, folder: Path, /) -> None:
        self._model.save_pretrained(folder)
        (folder / "shards").mkdir()
        for rank in range(2):
            (folder / "shards" / f"__{rank}_0.distcp").write_bytes(b"shard" * (rank + 1))


def test_shards_are_a_part_of_the_checkpoint_and_found_where_it_was_moved(
    tmp_path: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    state = replace(state_after(1), learner={"shards": "shards", "updates": 3})
    checkpoint = save_checkpoint(tmp_path / "run", state, WithShards(model).save_pretrained, tokenizer)
    written = (checkpoint / "COMMIT").read_text()
    assert f"\n10 {zlib.crc32(b'shardshard'):08x} shards/__1_0.distcp\n" in written
    assert find_damage(checkpoint) is None
    moved = (tmp_path / "run").rename(tmp_path / "elsewhere") / checkpoint.name
    assert read_state(moved).learner == {"shards": str(moved / "shards"), "updates": 3}
    shard = moved / "shards" / "__1_0.distcp"
    shard.write_bytes(b"shard")
    assert find_damage(moved) == "shards/__1_0.distcp has 5 bytes, not 10"
    shard.unlink()
    assert find_damage(moved) == "shards/__1_0.distcp is missing"


@pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.pt", "tokenizer.json"])
def test_one_flipped_bit_is_found(name: str, save: Callable[..., Path], rng: np.random.Generator) -> None:
    checkpoint = save(state_after(1))
    assert find_damage(checkpoint) is None
    content = bytearray((checkpoint / name).read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    (checkpoint / name).write_bytes(content)
    assert find_damage(checkpoint) == f"the content of {name} has changed since it was written"


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_files_have_the_permissions_of_new_files(
    umask: int, model: LlamaForCausalLM, save: Callable[..., Path]
) -> None:
    """An inference server of another account reads the weights."""
    checkpoint = save(state_after(1), write=WithShards(model).save_pretrained)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in checkpoint.rglob("*") if path.is_file()}
    assert {"model.safetensors", "trainer_state.pt", "COMMIT", "__1_0.distcp"} <= modes.keys()
    assert modes == dict.fromkeys(modes, 0o666 & ~umask)


@pytest.mark.linux
def test_a_full_disk_is_named_as_such(tmp_path: Path, model: LlamaForCausalLM, save: Callable[..., Path]) -> None:
    before = save(state_after(1))

    def on_full_disk(folder: Path) -> None:
        model.save_pretrained(folder)
        (folder / "trainer_state.pt").symlink_to("/dev/full")

    with pytest.raises(StorageError, match=r"No space left on device.*free disk space, then: brorl resume"):
        save(state_after(2), write=on_full_disk)
    assert complete_checkpoints(tmp_path) == [before]
