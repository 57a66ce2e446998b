"""Support for tests of whole runs: small settings, `brorl` commands in this process, and comparisons of runs."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import brorl
from brorl.cli import main

SMALL = (  # the shipped model on easy puzzles: about 0.1 s a step, and about half of the groups are mixed
    "--rollouts_per_prompt=16",
    "--prompts_per_step=4",
    "--optimizer.learning_rate=3e-4",
    "--optimizer.schedule=constant",
    "--optimizer.reference_batch=null",
    "--optimizer.mini_batches=2",
    "--optimizer.warmup_updates=5",
    "--data.sources={task: countdown, num_numbers: 3, max_number: 7}",
    "--data.held_out_fraction=0.2",
    "--data.split_seed=0",
    "--sampling.max_new_tokens=16",
    "--evaluation.num_prompts=2",
    "--evaluation.rollouts_per_prompt=4",
    "--evaluation.ks=[1, 4]",
    "--evaluation.every=2",
    "--evaluation.keep_best=false",
    "--engine.threads=1",
    "--report=false",
)


class Outcome(NamedTuple):
    """What a command did: exit code (minus the signal's number if one killed it), output, calls of Python functions."""

    code: int
    out: str
    err: str
    calls: int = 0

    @property
    def said(self) -> str:
        """Output and errors with all white space as single spaces: the console may break lines anywhere."""
        return " ".join((self.out + " " + self.err).split())


def command(*arguments: str | Path) -> Outcome:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as leaving:  # --help and --version
            code = int(leaving.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def refused(*arguments: str | Path) -> str:
    """Run a command that must fail before any work and leave the folder as it is; return its one line of error."""

    def contents() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path != Path("runs")}

    before, outcome = contents(), command(*arguments)
    assert outcome.code == 2, outcome
    assert outcome.out in ("", f"brorl {brorl.__version__}: starting\n")
    assert outcome.err.startswith("brorl: ")
    assert outcome.err.count("\n") == 1
    assert contents() == before
    return outcome.err


def save_tiny_model(
    folder: Path, *, end_token: bool = True, characters: str = "0123456789+-*/() >:", max_positions: int = 64
) -> Path:
    """Save a random Llama with a tokenizer of one token a character; about 3,000 weights."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(("<pad>", "<eos>", "<unk>", *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", clean_up_tokenization_spaces=False
    )
    if end_token:
        wrapped.eos_token = "<eos>"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(vocabulary),
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                max_position_embeddings=max_positions,
                bos_token_id=None,
                eos_token_id=1 if end_token else None,
                pad_token_id=0,
            )
        )
    model.save_pretrained(folder)
    wrapped.save_pretrained(folder)
    return folder


def metrics_without_times(run: Path) -> list[dict[str, Any]]:
    """Read the metrics, less what depends on the clock."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        record.pop("seconds", None)
        for evaluation in ("evaluation", "ema_evaluation"):
            record.get(evaluation, {}).pop("seconds", None)
    return records


def assert_same_run(run: Path, reference: Path) -> None:
    """Check that two finished runs are the same bit by bit: last checkpoint, metrics apart from times, responses."""
    import pyarrow.parquet as pq
    import torch

    assert metrics_without_times(run) == metrics_without_times(reference)

    last, last_reference = (sorted((r / "checkpoints").glob("step-*"))[-1] for r in (run, reference))
    assert last.name == last_reference.name
    files = {path.relative_to(last_reference) for path in last_reference.rglob("*") if path.is_file()}
    assert {path.relative_to(last) for path in last.rglob("*") if path.is_file()} == files
    for file in files:
        if file.suffix != ".pt" and file.name not in ("COMMIT", ".metadata"):  # pickles, and their sizes
            assert (last / file).read_bytes() == (last_reference / file).read_bytes(), file
    ours, theirs = (torch.load(folder / "trainer_state.pt", weights_only=True) for folder in (last, last_reference))
    assert theirs["learner"].get("shards") or theirs["learner"]["optimizer"]["state"]
    assert_identical(ours, theirs)

    for folder in ("rollouts", "evaluations"):
        names = sorted(f.name for f in (reference / folder).glob("*"))
        assert names or folder == "evaluations"
        assert sorted(f.name for f in (run / folder).glob("*")) == names
        for name in names:
            ours, theirs = (pq.read_table(r / folder / name) for r in (run, reference))
            assert ours.equals(theirs, check_metadata=True), (folder, name)
    assert not leftovers(run)


def assert_identical(ours: Any, theirs: Any, where: str = "") -> None:
    """Compare nested containers of tensors and numbers bit by bit."""
    import torch

    assert type(ours) is type(theirs), where
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        for key in theirs:
            assert_identical(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_identical(a, b, f"{where}[{i}]")
    elif isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert ours.shape == theirs.shape, where
        assert ours.numpy().tobytes() == theirs.numpy().tobytes(), where
    else:
        assert ours == theirs, where


def leftovers(run: Path) -> list[Path]:
    """Return what should not be left in a run directory: temporary files, checkpoints without COMMIT."""
    unfinished = [p for p in (run / "checkpoints").glob("*") if not (p / "COMMIT").exists()]
    return [*run.rglob("*.tmp"), *unfinished]
