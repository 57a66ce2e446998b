"""Support for tests of whole runs: `brorl` commands in this process, and in children that are harmed on the way.

Children are forked from one process that has imported torch already (`ChildRuns`; this file is its program too), so
that a run costs half a second and not five. A harm waits for an event in the child, such as the opening of a file, and
then kills it, interrupts it, tears a write in two or leaves it no room on the disk.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from brorl.cli import main

SMALL = (  # the shipped model on easy puzzles: about 0.1 s a step, and about half of the groups are mixed
    "--rollouts_per_prompt=16",
    "--prompts_per_step=4",
    "--optimizer.learning_rate=3e-4",
    "--optimizer.reference_batch=null",
    "--optimizer.mini_batches=2",
    "--optimizer.warmup_updates=5",
    "--data.sources={task: countdown, num_numbers: 3, max_number: 7}",
    "--data.held_out_share=0.2",
    "--data.split_seed=0",
    "--sampling.max_new_tokens=16",
    "--evaluation.num_prompts=2",
    "--evaluation.num_samples=4",
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


@dataclass(frozen=True)
class Harm:
    """What happens to a child, and when.

    Attributes:
        action: `kill`, `interrupt` (SIGINT), `terminate` (SIGTERM), `tear` (write half of a metrics line, then kill),
            or `limit` (no file may grow beyond `size` bytes from then on, which is how a full disk looks).
        event: Regular expression for the event, `open MODE PATH`, `rename TO`, `unlink PATH`, `half PATH` (half of what
            `torch.save` writes is written), `update N` (the optimizer did N updates), `sample N` (the engine is called
            for the N-th time) or `call N`.
        nth: Which of the events that match.
        size: Bytes, for `limit`.
    """

    action: str
    event: str
    nth: int = 1
    size: int = 0


class ChildRuns:
    """Runs commands in children."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )

    def __call__(self, *arguments: str | Path, harms: Sequence[Harm] = (), count_calls: bool = False) -> Outcome:
        """Run a command, and harm it."""
        assert self._server.stdin
        assert self._server.stdout
        job = {
            "arguments": [str(a) for a in arguments],
            "harms": [asdict(h) for h in harms],
            "count_calls": count_calls,
        }
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        return Outcome(**json.loads(self._server.stdout.readline()))

    def close(self) -> None:
        """End the process that forks."""
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.close()
        self._server.wait()
        self._server.stdout.close()


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
        record.get("evaluation", {}).pop("seconds", None)
    return records


def assert_same_run(run: Path, reference: Path) -> None:
    """Check that two finished runs are the same bit by bit: last checkpoint, metrics apart from times, responses."""
    import pyarrow.parquet as pq
    import torch

    assert metrics_without_times(run) == metrics_without_times(reference)

    last, last_reference = (sorted((r / "checkpoints").glob("step-*"))[-1] for r in (run, reference))
    assert last.name == last_reference.name
    assert {f.name for f in last.iterdir()} == {f.name for f in last_reference.iterdir()}
    for file in last_reference.iterdir():
        if file.suffix != ".pt" and file.name != "COMMIT":  # which holds the size of the other, a pickle's
            assert (last / file.name).read_bytes() == file.read_bytes(), file.name
    ours, theirs = (torch.load(folder / "trainer_state.pt", weights_only=True) for folder in (last, last_reference))
    assert theirs["learner"]["optimizer"]["state"]
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


def _serve() -> None:
    """Fork a child for every job on stdin, and answer with its outcome."""
    import gc

    import pyarrow.parquet
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    import brorl.assemble.run
    import brorl.config.reading
    import brorl.console.progress  # noqa: F401
    from brorl.model.load import load_model, load_tokenizer

    torch.set_num_threads(1)
    load_tokenizer("quickstart")  # fills caches of transformers
    load_model("quickstart", torch.device("cpu"), torch.float32)
    pyarrow.Table.from_pylist([{"imports": "pandas, where it is installed"}])
    gc.collect()
    gc.freeze()  # children neither search what was there before, nor copy its pages
    for line in sys.stdin:
        job = json.loads(line)
        answer = _forked(job["arguments"], [Harm(**h) for h in job["harms"]], job["count_calls"])
        print(json.dumps(answer._asdict()), flush=True)


def _forked(arguments: list[str], harms: list[Harm], count_calls: bool) -> Outcome:
    readers, writers = zip(*(os.pipe() for _ in range(3)), strict=True)  # what is written must fit into a pipe, 64 KiB
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(writers[0], 1)
        os.dup2(writers[1], 2)
        code = 99
        try:
            watch = _Watch(harms)
            sys.addaudithook(watch.on_event)
            if count_calls or any(h.event.startswith("call") for h in harms):
                sys.setprofile(watch.on_call)
            code = main(arguments)
            sys.setprofile(None)
            os.write(writers[2], str(watch.calls).encode())
        except BaseException:  # a traceback is what the tests look for
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    for descriptor in writers:
        os.close(descriptor)
    out, err, calls = (os.read(descriptor, 1 << 16).decode() for descriptor in readers)
    for descriptor in readers:
        os.close(descriptor)
    return Outcome(os.waitstatus_to_exitcode(status), out, err, int(calls or 0))


class _Watch:
    """Sees the child's events and does the harm."""

    def __init__(self, harms: list[Harm]) -> None:
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from brorl.rollout.native.engine import NativeEngine

        self.calls = 0
        self._harms = harms
        self._at_call = {int(h.event.split()[1]): h for h in harms if h.event.startswith("call")}
        self._seen = [0] * len(harms)
        self._updates = self._samples = 0
        self._sample = NativeEngine.sample
        NativeEngine.sample = lambda engine, *arguments: self._on_sample(engine, *arguments)  # type: ignore[method-assign]
        self._save = torch.save
        torch.save = self._save_in_two_halves
        register_optimizer_step_post_hook(self._on_update)

    def on_event(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            self._on(f"open {values[1]} {values[0]}", values[0])
        elif event == "os.rename":
            self._on(f"rename {values[1]}")
        elif event == "os.remove":
            self._on(f"unlink {values[0]}")

    def on_call(self, _frame: Any, event: str, _value: Any) -> None:
        if event == "call":
            self.calls += 1
            if self.calls in self._at_call:
                self._do(self._at_call[self.calls], None)

    def _save_in_two_halves(self, value: Any, path: Path) -> None:
        buffer = io.BytesIO()
        self._save(value, buffer)
        content, half = buffer.getvalue(), len(buffer.getvalue()) // 2
        if not any(h.event.startswith("half") for h in self._harms):
            return self._save(value, path)
        with path.open("wb") as file:
            file.write(content[:half])
            file.flush()
            self._on(f"half {path}")
            file.write(content[half:])
        return None

    def _on_update(self, *_: Any) -> None:
        self._updates += 1
        self._on(f"update {self._updates}")

    def _on_sample(self, engine: Any, *arguments: Any) -> Any:
        self._samples += 1
        self._on(f"sample {self._samples}")
        return self._sample(engine, *arguments)

    def _on(self, text: str, path: Any = None) -> None:
        for i, harm in enumerate(self._harms):
            if re.search(harm.event, text):
                self._seen[i] += 1
                if self._seen[i] == harm.nth:
                    self._do(harm, path)

    def _do(self, harm: Harm, path: Any) -> None:
        match harm.action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "tear":
                descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.write(descriptor, b'{"step": 4, "sampling": {"rou')
                os.kill(os.getpid(), signal.SIGKILL)
            case "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "limit":
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (harm.size, harm.size))
            case _:
                raise ValueError(f"there is no action {harm.action}")


if __name__ == "__main__":
    _serve()
