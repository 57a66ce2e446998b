"""`brorl eval`: how good a model is on benchmarks, files or puzzles, as pass@k with intervals."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import brorl
from brorl.activity import Phase
from brorl.api.checkpoint import Checkpoint, resolve_checkpoint
from brorl.api.runs_folder import RUNS
from brorl.cli.settings import Commands, add_settings, overrides_of
from brorl.cli.stop_signals import STOPPED
from brorl.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from brorl.assemble.evaluation import ReadyEvaluation
    from brorl.assemble.evaluation_data import Request
    from brorl.console.screen import Screen
    from brorl.evaluation.responses import ResponseStore, StoredPart

_SAMPLES, _TEMPERATURE, _TOP_P = 512, 0.6, 0.95
_MOST_SAMPLES = 2**20
_SETTINGS = ("device", "dtype", "engine.memory_gib", "engine.threads", "sampling.end_token", "evaluation.num_prompts")
_SECTIONS = ("prompt.", "verification.")


def add_parser(commands: Commands, chosen: bool) -> None:
    """Add the command; its settings only if it was `chosen`."""
    parser = commands.add_parser(
        "eval",
        usage="brorl eval CHECKPOINT [--data DATA ...] [--samples N] [--key value ...]",
        help="measure pass@k of a model on benchmarks, files or held-out prompts",
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT",
        help="a model (`quickstart`, a folder, a hub id), a run, or a checkpoint in one",
    )  # fmt: skip
    parser.add_argument(
        "--data", action="append", default=[], metavar="DATA",
        help="aime24, aime25, amc, math, minerva, olympiadbench, gsm8k; NAME=PATH for one of these at another place; a "
        "file, hub id or puzzle; or {path: ..., prompt_column: ...}; may be given several times (default: what the "
        "checkpoint's run held out)",
    )  # fmt: skip
    parser.add_argument(
        "--samples", type=int, default=_SAMPLES, metavar="N", help=f"responses per prompt (default: {_SAMPLES})"
    )
    parser.add_argument(
        "--ks", metavar="K,K,...", help="which pass@k (default: 1,2,4,... up to half of N, 256 at most)"
    )
    parser.add_argument(
        "--temperature", type=float, default=_TEMPERATURE, metavar="T",
        help=f"divisor of the logits, 0 is greedy (default: {_TEMPERATURE})",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", "--top_p", type=float, default=_TOP_P, metavar="P", help=f"nucleus mass (default: {_TOP_P})"
    )
    parser.add_argument(
        "--max-new-tokens", "--max_new_tokens", type=int, metavar="INT",
        help="length limit of a response (default: the run's, else what fits the model, 32,768 at most)",
    )  # fmt: skip
    parser.add_argument(
        "--output-dir", "--output_dir", metavar="DIR",
        help="folder; one that holds this evaluation is gone on with (default: one in runs/evaluations/)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="INT", help="decides what is sampled (default: 0)")
    parser.set_defaults(execute=evaluate)
    if chosen:
        from brorl.config.reading import settings_of
        from brorl.config.settings import TrainConfig

        names = [name for name, _ in settings_of(TrainConfig)]
        add_settings(parser, [name for name in names if name in _SETTINGS or name.startswith(_SECTIONS)])


def evaluate(parsed: argparse.Namespace) -> int:
    """Evaluate, print the results, write them, and return the exit code."""
    ks = check(parsed)
    checkpoint = resolve_checkpoint(parsed.checkpoint)
    request = request_of(parsed, checkpoint, ks)

    from brorl.console.screen import Screen

    with Screen(f"brorl {brorl.__version__}") as screen:
        return _evaluate(parsed, request, ks, screen)


def _evaluate(parsed: argparse.Namespace, request: Request, ks: tuple[int, ...], screen: Screen) -> int:
    from brorl.assemble.evaluation import prepare_evaluation
    from brorl.evaluation.responses import ResponseStore
    from brorl.runs.run_directory import RunDirectory

    console = screen.console
    ready = prepare_evaluation(request)
    output, is_new = _folder(parsed, ready)
    store = ResponseStore(output)
    try:
        with RunDirectory(output).locked():
            store.check(ready.settings)
            own = _compare_with_own(parsed, ready)
            _announce(console, ready, output, own)
            stored = _sample(screen, ready, store)
            screen.close()
            _finish(console, ready, stored, ks, output)
            for line in own:
                _say(console, line)
    except UserError:
        if is_new:
            with suppress(OSError):  # not empty: something is stored there
                output.rmdir()
        raise
    except KeyboardInterrupt:
        done = len(list(store.responses.glob("part-*.parquet")))
        _say(
            console,
            f"\nstopped: {done} of {len(ready.parts)} parts are stored; go on with the same command"
            + ("" if parsed.output_dir else f" (it finds {output})"),
        )
        return STOPPED
    return 0


def check(parsed: argparse.Namespace) -> tuple[int, ...]:
    """Check the options, and return the k of pass@k.

    Raises:
        UserError: On the first that cannot work.
    """
    from brorl.evaluation.summary import default_ks

    if not 1 <= parsed.samples <= _MOST_SAMPLES:
        raise UserError(f"--samples: a number between 1 and {_MOST_SAMPLES:,} is needed, not {parsed.samples}")
    if not 0 <= parsed.temperature < float("inf"):
        raise UserError(f"--temperature: a number from 0 on is needed, not {parsed.temperature}")
    if parsed.temperature == 0 and parsed.samples > 1:
        raise UserError(
            f"--temperature 0 is greedy: all {parsed.samples} responses to a prompt would be the same, and pass@k be "
            "pass@1; add --samples 1, or sample at a temperature above 0"
        )
    if not 0 < parsed.top_p <= 1:
        raise UserError(f"--top-p: a number above 0 and up to 1 is needed, not {parsed.top_p}")
    if parsed.max_new_tokens is not None and parsed.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens: a number from 1 on is needed, not {parsed.max_new_tokens}")
    if not 0 <= parsed.seed < 2**63:
        raise UserError(f"--seed: a number from 0 on is needed, not {parsed.seed}")
    if not all(data.strip() for data in parsed.data):
        raise UserError("--data: the value is empty; name a benchmark, file, hub id or puzzle, or leave --data out")
    if parsed.ks is None:
        return default_ks(parsed.samples)
    try:
        ks = tuple(sorted({int(k) for k in parsed.ks.split(",")}))
    except ValueError:
        raise UserError(f"--ks: the value should be numbers like 1,16,256, not {parsed.ks!r}") from None
    if ks[0] < 1:
        raise UserError(f"--ks: every number should be 1 or more, not {parsed.ks!r}")
    if ks[-1] > parsed.samples:
        raise UserError(
            f"--ks: pass@{ks[-1]} needs {ks[-1]} responses per prompt, and --samples gives {parsed.samples}; raise "
            f"--samples to {ks[-1]} or more, or leave {ks[-1]} out of --ks"
        )
    return ks


def request_of(parsed: argparse.Namespace, checkpoint: Checkpoint, ks: tuple[int, ...]) -> Request:
    """Return what is to be evaluated.

    Raises:
        UserError: If a setting does not work.
    """
    from brorl.assemble.evaluation_data import Request
    from brorl.config.reading import make_config, read_recipe

    overrides = overrides_of(parsed)
    limit = overrides.pop("evaluation.num_prompts", None)
    if limit is not None and (type(limit) is not int or limit < 1):
        raise UserError(f"--evaluation.num_prompts: a whole number from 1 on is needed, not {limit!r}")
    own_template = "prompt.template" in overrides
    shipped = checkpoint.model == "quickstart" and not Path("quickstart").exists()
    source = str(checkpoint.run_config) if checkpoint.run_config else "quickstart"
    belongs_to_run = checkpoint.run_config is not None or shipped
    settings: dict[str, Any] = read_recipe(source) if belongs_to_run else {}
    evaluation = settings.get("evaluation", {})
    overrides |= {
        "model": str(Path(checkpoint.model).expanduser().resolve()) if checkpoint.run_config else checkpoint.model,
        "evaluation.num_samples": parsed.samples,
        "evaluation.ks": list(ks),
        "evaluation.temperature": parsed.temperature,
        "evaluation.top_p": parsed.top_p,
        "evaluation.max_new_tokens": parsed.max_new_tokens or evaluation.get("max_new_tokens"),
        "evaluation.num_prompts": _MOST_SAMPLES,  # without effect: the request has the limit
        "seed": parsed.seed,
    }
    config = make_config(settings, overrides, source if belongs_to_run else "the options")
    return Request(config, tuple(parsed.data), belongs_to_run, own_template, limit)


def _folder(parsed: argparse.Namespace, ready: ReadyEvaluation) -> tuple[Path, bool]:
    """Make the folder before any work, or refuse one that cannot be written to; tell whether it is new."""
    if parsed.output_dir is None:
        import json
        from hashlib import blake2b

        digest = blake2b(json.dumps(ready.settings, sort_keys=True).encode(), digest_size=4).hexdigest()
        output = RUNS / "evaluations" / f"{_label(ready.request.config.model)}-{digest}"
    else:
        output = Path(parsed.output_dir).expanduser()
    is_new = not output.exists()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot write to --output-dir {output} ({error.strerror}); choose a folder that you may write to"
        ) from error
    return output, is_new


def _label(model: str) -> str:
    """Return a short name of a model for a folder: its last part, with the run's for a checkpoint."""
    parts = [part for part in Path(model).parts if part != "/"]
    chosen = [parts[-3], parts[-1]] if len(parts) > 2 and parts[-2] == "checkpoints" else parts[-1:]
    return re.sub(r"[^\w.-]+", "_", "-".join(chosen)) or "model"


def _compare_with_own(parsed: argparse.Namespace, ready: ReadyEvaluation) -> list[str]:
    """Say by what the evaluation differs from the run's own, if it asks what the run held out."""
    from brorl.cli.own_evaluation import compare_with_own

    run_config = resolve_checkpoint(parsed.checkpoint).run_config
    if run_config is None or parsed.data:
        return []
    return compare_with_own(parsed.checkpoint, run_config, ready.settings)


def _announce(console: Console, ready: ReadyEvaluation, output: Path, own: Sequence[str]) -> None:
    """Say what is about to happen."""
    settings, device = ready.settings, ready.settings["device"]
    sets = ", ".join(f"{name} ({one['prompts']:,} prompts)" for name, one in settings["data"].items())
    drawn = f"temperature {settings['temperature']:g}, top-p {settings['top_p']:g}"
    for line in (
        f"brorl {brorl.__version__}: {settings['checkpoint']} on {device} ({settings['dtype']}), {sets}",
        f"{settings['samples']:,} responses a prompt, {drawn}, at most {settings['max_new_tokens']:,} tokens each, "
        f"seed {settings['seed']}; folder {output}",
        *ready.notes,
        *own[:1],
    ):
        _say(console, line)


def _sample(screen: Screen, ready: ReadyEvaluation, store: ResponseStore) -> list[StoredPart]:
    """Load the model and do all parts that are not done."""
    import json

    from brorl.assemble.evaluation import load_evaluated_model
    from brorl.evaluation.evaluate import evaluate_parts
    from brorl.evaluation.report import progress_line
    from brorl.runs.run_directory import RunDirectory

    console = screen.console
    screen.observe(Phase("loading", "model"))
    respondent, weights = load_evaluated_model(ready, screen.observe)
    store.begin({**ready.settings, "weights": weights})
    done = sum(store.file_of(part).is_file() for part in ready.parts)
    if done:
        _say(console, f"going on: {done} of {len(ready.parts)} parts are stored already")
    if done < len(ready.parts):
        RunDirectory(store.path).write_environment()
        machine = json.loads((store.path / "env.json").read_text("utf-8"))
        machine.pop("continued_from", None)
        store.add_sitting({"parts_before": done, **machine})
    return evaluate_parts(ready.parts, respondent, store, lambda at: _say(console, progress_line(at), "dim"))


def _finish(
    console: Console, ready: ReadyEvaluation, stored: list[StoredPart], ks: tuple[int, ...], output: Path
) -> None:
    """Print the results, and write them."""
    import json

    from brorl.evaluation.report import EvaluationReport, evaluation_record, pass_table, remarks, response_table
    from brorl.evaluation.responses import ResponseStore
    from brorl.evaluation.summary import summarise_all
    from brorl.storage import replace_file, storage_errors

    seconds_of = {part.data_set: 0.0 for part in ready.parts}
    for part, one in zip(ready.parts, stored, strict=True):
        seconds_of[part.data_set] += one.seconds
    results = [result for one in stored for result in one.results]
    sittings = ResponseStore(output).sittings()
    settings = json.loads((output / "settings.json").read_text("utf-8"))
    report = EvaluationReport(summarise_all(results, ks, seconds_of), results, settings, ready.unreadable, sittings)
    target = output / "evaluation.json"
    with storage_errors(target, "give the same command again"):
        replace_file(target, json.dumps(evaluation_record(report), indent=1).encode())
    for table in (pass_table(report), response_table(report)):
        console.print()
        console.print(table)
    for line in remarks(report):
        _say(console, f"- {line}")
    _say(console, f"\nwritten: {target}; every response: {output / 'responses'}")


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, soft_wrap=True, markup=False, style=style)
