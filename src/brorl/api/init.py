"""`brorl init`: a first recipe for the user's own data file, with a comment on every setting.

The numbers suit a first run on a laptop; the comments name those of the paper. A config of TRL or verl becomes a recipe
with its own numbers, and a taskset of `verifiers` a data file and its recipe. Nothing is imported that needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brorl.config.conversion import Conversion, convert
from brorl.config.reading import make_config, nested_settings, parse_yaml
from brorl.errors import StorageError, UserError
from brorl.model.name import shipped_folder
from brorl.prompts.countdown import COUNTDOWN_DOMAIN
from brorl.prompts.files import read_source
from brorl.prompts.guess import Guess, guess_meaning
from brorl.prompts.question import Question, split_held_out
from brorl.prompts.rendering import TEMPLATES
from brorl.prompts.settings import FileSource
from brorl.storage import replace_file, storage_errors
from brorl.verification.domains.table import DOMAINS
from brorl.verification.domains.taskset import PREFIX, SCORE, read_taskset

_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_FUNCTION_FILE = "my_checks.py"
_SIGNATURE = "def check(response: str, reference: str) -> bool"
_MOST_TASKS = 10_000  # of a taskset
_HELD_OUT = 64  # questions, if there are enough
_FRACTIONS = (0.2, 0.3, 0.4, 0.5)  # held-out fractions to try for small files
_COLUMN = 44  # of the comments
_OPTIONS = {"path": "DATA_FILE", "prompt_column": "--prompt-column", "answer_column": "--answer-column"}


def init(
    data_file: str | None = None,
    *,
    trainer_config: str | Path | None = None,
    output: str | Path = "mine.yaml",
    model: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    domain: str | None = None,
    taskset_config: str | None = None,
) -> None:
    """Read the data, write the recipe, and print the guesses.

    Args:
        data_file: JSONL, JSON or Parquet file, or a folder or pattern of such files, or an installed taskset of the
            library verifiers: `verifiers:NAME` (default: the data of --from).
        trainer_config: A YAML config of TRL's GRPOTrainer or of verl, to be written as a recipe.
        output: Recipe to write.
        model: Model folder or hub id (default: a small Qwen model; quickstart for countdown puzzles).
        prompt_column: Column of the question (default: guessed).
        answer_column: Column of the reference answer (default: guessed).
        domain: Verifier: math, countdown, or a name for your own (default: guessed).
        taskset_config: Settings of the taskset as YAML, such as {split: train}.

    Raises:
        UserError: If the data does not fit, or `output` exists.
    """
    output = Path(output)
    if output.exists():
        raise UserError(f"{output} already exists; choose another name with --output")
    conversion = None if trainer_config is None else _conversion(Path(trainer_config).expanduser())
    own_model = {"model": model} if model else {}
    if conversion is not None and not own_model and "model" not in conversion.settings:
        raise UserError(f"{trainer_config} names no model; give it, such as --model Qwen/Qwen2.5-0.5B-Instruct")
    if data_file is None:
        if conversion is None or "data.sources" not in conversion.settings:
            named = "" if trainer_config is None else f": {trainer_config} names no data"
            raise UserError(f"give the file of your questions{named}, such as brorl init problems.jsonl")
        _write(output, _converted(conversion, str(output), own_model))
        print("\n".join(_conversion_summary(conversion, output)))  # noqa: T201
        return
    function = f"{_FUNCTION_FILE}:check"
    if data_file.startswith(PREFIX):
        name, function = data_file.removeprefix(PREFIX), SCORE
        data_file = _write_tasks(name, taskset_config, output.parent)
        prompt_column, answer_column, domain = "prompt", "answer", name
    elif taskset_config is not None:
        raise UserError(f"--taskset-config is for tasksets, and {data_file} is a file; give {PREFIX}NAME, or remove it")
    try:
        guess = guess_meaning(data_file, prompt_column, answer_column, domain)
        if function == SCORE:
            guess = guess._replace(domain_reason="the rewards of the taskset", answer_after=None)  # answers are JSON
        questions = _read(data_file, guess)
    except UserError as error:  # it names settings of a recipe
        message = str(error)
        for setting, option in _OPTIONS.items():
            message = message.replace(f"data.sources[].{setting}:", option).replace(f"data.sources[].{setting}", option)
        raise UserError(message) from error
    starter = _starter(data_file, model, guess, questions, function)
    if conversion is None:
        _write(output, _recipe(starter, str(output)))
        print("\n".join(_summary(starter, output)))  # noqa: T201
        return
    _write(output, _converted(conversion, str(output), _data_of(starter) | own_model))
    print("\n".join(_conversion_summary(conversion, output)))  # noqa: T201


def _write(output: Path, text: str) -> None:
    """Check a recipe and write it."""
    make_config(parse_yaml(text, str(output)), {}, str(output))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StorageError(f"could not write {output}: {error.strerror}; choose another --output") from error


def _write_tasks(name: str, config: str | None, folder: Path) -> str:
    """Write the tasks of a taskset of `verifiers` into a data file beside the recipe, and return its path."""
    settings = {} if config is None else parse_yaml(config, "--taskset-config")
    if not isinstance(settings, dict):
        raise UserError(f"--taskset-config must be a mapping of settings, such as {{split: train}}, got {config!r}")
    file = folder / f"{Path(name).name}.jsonl"
    if file.exists():
        raise UserError(f"{file} already exists; remove it, or write the recipe into another folder with --output")
    rows = list(read_taskset(name, settings, _MOST_TASKS))
    with storage_errors(file, "run the command again"):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    first = f"; they are its first {_MOST_TASKS:,}" if len(rows) == _MOST_TASKS else ""
    print(f"wrote {file}: {len(rows):,} tasks{first}")  # noqa: T201
    return str(file)


def _conversion(file: Path) -> Conversion:
    try:
        config = parse_yaml(file.read_text("utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--from {file}: {getattr(error, 'strerror', None) or error}; give a YAML config") from error
    if not isinstance(config, dict):
        raise UserError(f"--from {file} is not a mapping of settings; give the YAML config of TRL or verl")
    return convert(config, str(file))


def _converted(conversion: Conversion, name: str, own: Mapping[str, Any]) -> str:
    """Return the recipe of another trainer's config as YAML; `own` has the settings that the data decides."""
    from io import StringIO

    from ruamel.yaml import YAML

    stream = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(nested_settings({**conversion.settings, **own}, name), stream)
    lines = [f"# From a config of {conversion.trainer}. Check it: brorl check {name}. Train it: brorl train {name}"]
    lines += [f"# - {remark}" for remark in conversion.remarks]
    if conversion.without_counterpart:
        lines.append(f"# Without a counterpart, and left out: {', '.join(conversion.without_counterpart)}")
    return "\n".join([*lines, stream.getvalue()])


def _data_of(starter: _Starter) -> dict[str, Any]:
    """Return the settings of a first recipe that the data decides."""
    guess = starter.guess
    source: dict[str, Any] = {"path": starter.path}
    if guess.layout:
        source["layout"] = guess.layout
    else:
        after = {} if guess.answer_after is None else {"answer_after": guess.answer_after}
        source |= {"prompt_column": guess.prompt_column, "answer_column": guess.answer_column, "domain": guess.domain}
        source |= after
    functions = {} if starter.function is None else {guess.domain: starter.function}
    own = {"data.sources": [source], "data.held_out_fraction": starter.held_out_fraction}
    own |= {"prompt.template": starter.template, "evaluation.num_prompts": min(starter.num_held_out, _HELD_OUT)}
    return own | ({"verification.functions": functions} if functions else {})


def _conversion_summary(conversion: Conversion, output: Path) -> list[str]:
    """Return what was converted, what was not, and the next commands."""
    left = conversion.without_counterpart
    return [
        f"wrote {output}, from a config of {conversion.trainer}: {len(conversion.settings)} settings",
        *(f"  {remark}" for remark in conversion.remarks),
        *([f"  without a counterpart, and left out: {', '.join(left)}"] if left else []),
        f"check the recipe: brorl check {output}",
        f"train with it: brorl train {output}",
    ]


def _read(data_file: str, guess: Guess) -> Sequence[Question]:
    name = Path(data_file).stem.replace(":", "-") or "data"
    if guess.layout:
        return read_source(FileSource(path=data_file, name=name, layout=guess.layout)).questions
    source = FileSource(
        path=data_file,
        name=name,
        prompt_column=guess.prompt_column,
        answer_column=guess.answer_column,
        domain=guess.domain,
        answer_after=guess.answer_after,
    )
    return read_source(source).questions


@dataclass(frozen=True)
class _Starter:
    """The settings of a first recipe that depend on the data."""

    model: str
    path: str
    guess: Guess
    function: str | None  # the user's verifier; None if the domain has a verifier
    template: str
    max_new_tokens: int
    max_prompt_tokens: int | None  # None if the positions of the model are unknown
    num_questions: int
    num_held_out: int  # 0 switches evaluation off
    held_out_fraction: float


def _starter(path: str, model: str | None, guess: Guess, questions: Sequence[Question], function: str) -> _Starter:
    """Choose the settings; a prompt and its response share the positions of the model."""
    positions = _positions(model)
    domain = "" if function == SCORE else guess.domain  # a taskset has its own rewards, whatever its name
    puzzles, names_box = domain == COUNTDOWN_DOMAIN, all("boxed" in question.asked for question in questions)
    response = 16 if puzzles else 512 if domain == "code" else 256
    response = response if positions is None else max(1, min(response, positions // 2))
    wanted = round(max(0.02, min(_HELD_OUT / len(questions), _FRACTIONS[0])), 2)
    sizes = ((fraction, len(split_held_out(questions, fraction, 0).held_out)) for fraction in (wanted, *_FRACTIONS))
    fraction, num_held_out = next(((s, n) for s, n in sizes if 0 < n < len(questions)), (0.0, 0))
    return _Starter(
        model=model or ("quickstart" if puzzles else _MODEL),
        path=path,
        guess=guess,
        function=None if domain in DOMAINS else function,
        template="{prompt}" if names_box else TEMPLATES.get(domain, "{prompt}"),
        max_new_tokens=response,
        max_prompt_tokens=None if positions is None else positions - response,
        num_questions=len(questions),
        num_held_out=num_held_out,
        held_out_fraction=fraction,
    )


def _recipe(starter: _Starter, name: str) -> str:
    """Return the recipe as YAML with comments; `name` is its file."""
    guess, after, lengths, functions = starter.guess, "", "", ""
    split = f"{starter.num_held_out} of {starter.num_questions:,} questions are held out for evaluation"
    if guess.answer_after is not None:
        after = f"""
      answer_after: {_quoted(guess.answer_after)}  # the answer follows the last occurrence of this text"""
    columns = f"""
      prompt_column: {_quoted(guess.prompt_column)}  # the question
      answer_column: {_quoted(guess.answer_column)}  # the reference answer{after}
      domain: {_quoted(guess.domain)}  # the verifier: {guess.domain_reason}"""
    if guess.layout:
        columns = f"""
      layout: {_quoted(guess.layout)}  # decides the columns and the verifier, {guess.domain}"""
    if starter.max_prompt_tokens is not None:
        lengths = f"""
  max_prompt_tokens: {starter.max_prompt_tokens}  # longer prompts are dropped: the model has no room for a response"""
    if starter.function is not None:
        write = "" if starter.function == SCORE else f"  # write {_SIGNATURE}"
        functions = f"""
verification:
  functions:
    {_quoted(guess.domain)}: {starter.function}{write}"""
        if starter.function == SCORE:
            functions += (
                "\n  timeout_s: 60  # the first verification of a worker imports the library, which takes seconds"
            )
    text = f"""\
# A first try on a laptop. Check it: brorl check {name}. Train it: brorl train {name}
# Every key is also an option of the command line (--steps 50). All keys: brorl train --help, docs/reference/recipe.md
model: {_quoted(starter.model)}  # a folder or a Hugging Face hub id
rollouts_per_prompt: 16  # N: 16 for a quick try, 512 in BroRL; compare them: brorl plan
prompts_per_step: 8  # small, for a laptop; BroRL has 128
steps: 20  # a first look; the runs of the paper take 419 to 3,000
checkpoint_every: 10  # a stopped run resumes from the last checkpoint: brorl resume
data:
  sources:
    - path: {_quoted(starter.path)}  # relative to the folder in which brorl is started{columns}
  held_out_fraction: {starter.held_out_fraction:g}  # {split}{lengths}
prompt:
  template: {_quoted(starter.template)}  # text around each question, {{prompt}}
  chat: auto  # use the model's chat template if it has one
sampling:
  temperature: 1.0  # sample from the model as it is
  max_new_tokens: {starter.max_new_tokens}  # longer responses are cut and count as incorrect
optimizer:
  learning_rate: 2.0e-6  # brorl's default, from ProRL; raise it for a very small model
  mini_batches: 2  # updates per step; each needs at least one prompt
evaluation:
  num_prompts: {min(starter.num_held_out, 32)}  # held-out questions for pass@k
  num_samples: 16  # responses per question
  ks: [1, 16]  # pass@1 and pass@16; a k is at most num_samples
  every: 10  # steps between evaluations; the start and the end are always evaluated
engine:
  threads: 0  # CPU threads; 0: by the size of the model; brorl check measures them{functions}
"""
    return "\n".join(map(_aligned, text.splitlines())) + "\n"


def _aligned(line: str) -> str:
    """Return a line with its comment in the column of all comments, or above the setting where that is long."""
    setting, _, comment = line.rpartition("  # ")
    if not setting:
        return line
    if len(setting) <= _COLUMN:
        return f"{setting:<{_COLUMN + 2}}# {comment}"
    indent = " " * (len(setting) - len(setting.lstrip()))
    return f"{indent}# {comment}\n{setting}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _positions(model: str | None) -> int | None:
    """Return the positions of a model on this machine, without importing transformers; None if they are unknown."""
    folder = shipped_folder(model or "") or Path(model or "").expanduser()
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        positions = config.get("text_config", config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):  # `brorl check` has the error
        return None
    return positions if isinstance(positions, int) else None


def _summary(starter: _Starter, output: Path) -> list[str]:
    """Return the guesses, the file written, and the next commands."""
    guess = starter.guess
    after = f", after the last {guess.answer_after}" if guess.answer_after else ""
    columns = [
        f"  question: column {guess.prompt_column}",
        f"  answer: column {guess.answer_column}{after}; the first is {guess.example[:60]!r}",
    ]
    lines = [
        f"{starter.path}: {starter.num_questions:,} questions",
        *([f"  layout: {guess.layout}"] if guess.layout else columns),
        f"  verifier: {guess.domain}, {guess.domain_reason}",
        f"wrote {output}: model {starter.model}, 16 rollouts x 8 prompts per step, 20 steps",
    ]
    if starter.function not in (None, SCORE):
        lines.append(f"write the verifier first: {_SIGNATURE}, in {_FUNCTION_FILE}")
    return [*lines, f"check the recipe: brorl check {output}", f"train with it: brorl train {output}"]
