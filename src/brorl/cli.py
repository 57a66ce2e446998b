"""The command line. A command's options and their help come from the arguments and docstring of its function.

An error that the user can fix prints one line on stderr. Its exit code is 2 before any work and 1 if it stopped a run.
Ctrl-C, SIGTERM and SIGHUP stop every command with exit code 130. To keep `brorl --help` fast, a command's module is
imported only when the command runs, and torch only once the settings are valid.
"""

from __future__ import annotations

import argparse
import builtins
import errno
import inspect
import os
import select
import signal
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, NoReturn, TextIO, Union, get_args, get_origin

import brorl
from brorl.errors import CLOSED, STOPPED, UserError, nearest
from brorl.training.stop_request import on_stop, stop_signals


class Command(NamedTuple):
    """A command. Functions and tuples are written as `module:name`, without the package: `api.train:train_command`."""

    summary: str  # one line for `brorl --help`
    function: str  # its arguments become the options of the command
    inherits: tuple[str, ...] = ()  # functions whose arguments also become options
    settings: str = ""  # the tuple of settings and sections (`verification.`) that it accepts; empty means all
    is_shown: bool = True  # whether the result is printed here; otherwise the function prints it


COMMANDS = {
    "init": Command("write a first recipe for a data file, with a comment on every setting", "api.init:init"),
    "data": Command(
        "check the sources of a recipe, and show their questions, dropped rows, lengths and example prompts",
        "api.data:data"),
    "check": Command("check a recipe without training: settings, prompts, verifier, memory, seconds per step",
                     "api.check:check", is_shown=False),
    "train": Command("train a model from a recipe (default: the built-in `quickstart`)", "api.train:train_command",
                     is_shown=False),
    "resume": Command("resume a run from its last checkpoint", "api.train:resume_command",
                      settings="config.reading:CHANGEABLE_ON_RESUME", is_shown=False),
    "eval": Command("measure pass@k of a model on benchmarks, files or held-out prompts", "api.evaluate:evaluate",
                    settings="api.evaluate:SETTINGS"),
    "compare": Command("train arms from the same checkpoint with the same budget, and report which is better",
                       "api.compare:compare_command", inherits=("api.compare:compare",)),
    "tune": Command("find the N, objective and learning rate with the best final score for an aim, and test them "
                    "against your recipe", "api.tune:tune"),
    "report": Command("show runs as one HTML file: charts, rollouts, settings", "api.stored_runs:report"),
    "samples": Command("show stored rollouts: prompts with their pass rates, responses with verdicts",
                       "api.stored_runs:samples"),
    "tree": Command("sample N responses to one prompt and draw them as a tree, before and after training",
                    "api.sample:sample", settings="api.sample:SETTINGS"),
    "verify": Command("score stored responses, and compare the verdicts with stored ones", "api.verify:verify",
                      settings="api.verify:SETTINGS"),
    "plan": Command("predict the gains and costs of more rollouts per prompt on this machine", "api.plan:plan_command",
                    inherits=("api.plan:plan",), is_shown=False),
    "doctor": Command("check this machine: device, memory, sandbox (exit code 1 without a sandbox for code)",
                      "api.doctor:doctor"),
    "completion": Command("print a script that completes commands and options in a shell", "cli:completion"),
}  # fmt: skip

_METAVARS = {
    "recipe": "RECIPE", "output": "FILE", "folder": "DIR", "output_dir": "DIR", "sweep": "KEY=V,V,...",
    "eval_points": "N|X,X,...",
}  # fmt: skip
_SETTING = "setting:"
_LIST = inspect.Parameter.VAR_POSITIONAL
_PATH_PROBLEMS = {
    errno.ENAMETOOLONG: "the name is too long; choose a different path",
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM), "permission denied; give your user access to it, or choose a different path"
    ),
}
_FULL = (errno.ENOSPC, errno.EDQUOT)


class _Help(argparse.HelpFormatter):
    """A help formatter that breaks lines only at spaces, so paths stay whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_Help, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        """Exit after --help or --version."""
        sys.stdout.flush()
        super().exit(status, message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (without the program name; default: this process's) and return its exit code."""
    try:
        with on_stop(_interrupt, [number for number in stop_signals() if number != signal.SIGINT]):
            code = _run(list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()  # detect a closed pipe here, not when the interpreter exits
            return code
    except UserError as error:
        print(f"brorl: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except BrokenPipeError:
        if not _is_closed(sys.stdout):  # the broken pipe led to a different process that has exited
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout on exit
        return CLOSED
    except OSError as error:
        if error.filename is None and error.errno in _FULL:  # a run's files have names, so this is redirected output
            print(f"brorl: {error.strerror}; free some space, or write the output elsewhere", file=sys.stderr)  # noqa: T201
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes stdout on exit
            return CLOSED
        problem = _PATH_PROBLEMS.get(error.errno or 0)
        if problem is None or error.filename is None:
            raise
        print(f"brorl: {error.filename}: {problem}", file=sys.stderr)  # noqa: T201
        return UserError.exit_code
    except KeyboardInterrupt as stop:
        if not stop.args:  # otherwise the command has already printed how to continue
            print("brorl: stopped", file=sys.stderr)  # noqa: T201
        return STOPPED


def _is_closed(stream: TextIO) -> bool:
    """Return whether a stream is a pipe whose reader has closed it, as `head` does."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # not a file, or poll is not available
        return False


def _interrupt(_number: int) -> NoReturn:
    raise KeyboardInterrupt


def make_parser(chosen: Collection[str], with_settings: bool = True) -> argparse.ArgumentParser:
    """Make the parser of all commands. Only `chosen` commands get options, because adding them imports the command."""
    parser = _Parser(prog="brorl", description="RLVR with many rollouts per prompt, computed as one tree.")
    parser.add_argument("--version", action="version", version=f"brorl {brorl.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        added = commands.add_parser(name, help=command.summary, argument_default=argparse.SUPPRESS)
        if name in chosen:
            _add_options(added, command, with_settings)
    return parser


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print a script that completes commands, options, option values and recipes. Completing does not start Python.

    Args:
        shell: The shell that will run the script.
    """
    from brorl.api.completion import completion_script

    print(completion_script(make_parser(COMMANDS), shell, _SETTING))  # noqa: T201


def _run(arguments: Sequence[str]) -> int:
    parser = make_parser(arguments[:1])
    if arguments and arguments[0] not in COMMANDS and not arguments[0].startswith("-"):
        advice = nearest(arguments[0], COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
        raise UserError(f"{arguments[0]!r} is not a command{advice} (see brorl --help)")
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown and parsed.command is None:
        raise UserError(f"{unknown[0].partition('=')[0]} is not an option of brorl (see brorl --help)")
    if unknown:
        raise UserError(_unknown_option(unknown[0], parsed.command))
    if parsed.command is None:
        parser.print_help()
        return 0
    command = COMMANDS[parsed.command]
    options = vars(parsed)
    function = _load(command.function)
    named = {name: value for name, value in options.items() if name != "command" and not name.startswith(_SETTING)}
    kinds = {name: parameter.kind for name, parameter in inspect.signature(function).parameters.items()}
    listed = [value for name in [*named] if kinds.get(name) is _LIST for value in named.pop(name)]
    return _show(function(*listed, **named, **_overrides_of(options)), command.is_shown)


def _show(result: Any, is_shown: bool) -> int:
    """Print a command's result, if any, and return the exit code."""
    if isinstance(result, int):
        return result
    if is_shown and result is not None:
        from brorl.console.screen import Screen

        is_rich = hasattr(result, "__rich__") or hasattr(result, "__rich_console__")
        Screen().console.print(result if is_rich else str(result), soft_wrap=True, markup=False)
    return int(getattr(result, "exit_code", 0))


def _load(reference: str) -> Any:
    """Return the object of `module:name`."""
    module, _, name = reference.partition(":")
    return getattr(import_module(f"brorl.{module}"), name)


def _parameters_of(command: Command) -> dict[str, tuple[inspect.Parameter, str]]:
    """Return the arguments that become options of a command: name -> (parameter, help)."""
    parameters: dict[str, tuple[inspect.Parameter, str]] = {}
    for function in map(_load, (command.function, *command.inherits)):
        # A name that the module imports only for type checkers resolves to `Any`.
        names = defaultdict(lambda: Any, vars(builtins) | vars(sys.modules[function.__module__]))
        helps = _help_of(function.__doc__ or "")
        for name, parameter in inspect.signature(function, locals=names, eval_str=True).parameters.items():
            if name not in (*parameters, "progress"):
                parameters[name] = parameter, helps.get(name, "")
    return parameters


def _add_options(parser: argparse.ArgumentParser, command: Command, with_settings: bool) -> None:
    """Add the options of a command: the arguments of its functions, and the settings that it accepts."""
    parameters = _parameters_of(command)
    usages = [
        _add_option(parser, parameter, text)
        for parameter, text in parameters.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]  # fmt: skip
    usages.sort(key=lambda usage: usage.startswith("[-"))
    accepts_settings = "overrides" in parameters
    parser.usage = " ".join([parser.prog, *usages, *(["[--key value ...]"] if accepts_settings else [])])
    if accepts_settings and with_settings:
        accepted = _load(command.settings) if command.settings else ("",)
        _add_settings(parser, lambda name: name not in parameters and name.startswith(accepted))


def _help_of(docstring: str) -> dict[str, str]:
    """Return the help of each argument in a docstring: `Seed of the run.` becomes `seed of the run`."""
    from docstring_parser.google import parse  # this import takes a tenth of a second

    texts = {argument.arg_name: " ".join((argument.description or "").split()) for argument in parse(docstring).params}
    lines = {name: text.removesuffix(".") for name, text in texts.items()}
    return {name: line if line[1:2].isupper() else line[:1].lower() + line[1:] for name, line in lines.items()}


def _type_of(annotation: Any) -> Any:
    """Return the type of an option: bool, int, float, str, a Literal, or a tuple with the type of its values."""
    is_union = get_origin(annotation) in (Union, UnionType)
    hints = [part for part in (get_args(annotation) if is_union else (annotation,)) if part is not NoneType]
    sequences = [part for part in hints if get_origin(part) is Sequence]
    if sequences:
        return get_args(sequences[0])
    return hints[0] if len(hints) == 1 and (get_origin(hints[0]) is Literal or hints[0] in (bool, int, float)) else str


def _add_option(parser: argparse.ArgumentParser, parameter: inspect.Parameter, text: str) -> str:
    """Add an argument as a positional or an option, and return its text in the usage line: `[--seed INT]`."""
    name = parameter.name
    default = parameter.default
    hint = _type_of(parameter.annotation)
    numbers = {(int,): "INT,INT,...", (float,): "FLOAT,FLOAT,...", int: "INT", float: "FLOAT"}.get(hint)
    value = numbers or _METAVARS.get(name) or ("NAME" if name.endswith("_column") else name.upper())
    more: dict[str, Any] = {"metavar": value}
    if not isinstance(default, bool) and default not in (parameter.empty, None, "", ()) and "(default:" not in text:
        text += f" (default: {','.join(map(str, default)) if isinstance(default, tuple) else default})"
    if hint is bool:
        more = {"action": "store_false" if default else "store_true"}
        text = f"do not {text}" if default else text
    elif hint == (str,):
        more["action"] = "append"
    elif isinstance(hint, tuple):
        more["type"] = _numbers_of(hint[0])
    elif get_origin(hint) is Literal:
        value = f"{{{','.join(get_args(hint))}}}"
        more = {"choices": get_args(hint)}
    elif hint is not str:
        more["type"] = hint
    more["help"] = text.replace("%", "%%")
    if parameter.kind is parameter.KEYWORD_ONLY:
        words = f"no_{name}" if hint is bool and default else name
        flag = f"--{words.replace('_', '-')}"
        parser.add_argument(*dict.fromkeys((flag, f"--{words}")), dest=name, **more)
        usage = f"[{flag}]" if hint is bool else f"[{flag} {value}]"
    elif parameter.kind is _LIST:
        value = name.upper().removesuffix("S")
        parser.add_argument(name, **more | {"nargs": "*", "metavar": value})
        usage = f"[{value} ...]"
    else:
        is_needed = default is parameter.empty
        parser.add_argument(name, **more | ({} if is_needed else {"nargs": "?"}))
        usage = value if is_needed else f"[{value}]"
    return usage


def _numbers_of(kind: type) -> Callable[[str], tuple[Any, ...]]:
    """Return the parser of a list of numbers such as 1,16,256."""

    def numbers(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(part) for part in text.strip().removeprefix("[").removesuffix("]").split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected numbers like 1,16,256, not {text!r}") from None

    return numbers


def _add_settings(parser: argparse.ArgumentParser, only: Callable[[str], bool]) -> None:
    """Add an option for every setting whose dotted name `only` accepts; its help is the setting's description."""
    from brorl.config.reading import setting_fields
    from brorl.config.settings import TrainConfig

    group = parser.add_argument_group("settings", "every key of a recipe; the command line takes precedence")
    for name, info in setting_fields(TrainConfig):
        if only(name):
            group.add_argument(
                *dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")),
                dest=f"{_SETTING}{name}",
                metavar=_type_name(info.annotation),
                help=f"{info.description} (default: {_shown(info.default)})".replace("%", "%%"),
            )


def _overrides_of(options: dict[str, Any]) -> dict[str, Any]:
    """Return the settings given as options; each value is parsed as YAML."""
    settings = {n.removeprefix(_SETTING): v for n, v in options.items() if n.startswith(_SETTING)}
    if not settings:
        return {}
    from brorl.config.reading import setting_fields
    from brorl.config.settings import TrainConfig

    kinds = {name: info.annotation for name, info in setting_fields(TrainConfig)}
    return {name: _value_of(name, text, kinds[name]) for name, text in settings.items()}


def _value_of(name: str, text: str, kind: Any) -> Any:
    """Parse a setting's value: text stays unchanged, other kinds are read as YAML, and lists need no brackets."""
    from brorl.config.reading import parse_yaml

    if kind in (str, str | None) and text != "null":
        return text
    is_list = any(get_origin(part) is tuple for part in (kind, *get_args(kind)))
    is_bare = is_list and text != "null" and not text.lstrip().startswith(("[", "{"))
    return parse_yaml(f"[{text}]" if is_bare else text, f"--{name}")


def _unknown_option(option: str, name: str) -> str:
    """Return the error message for an option that a command does not have."""
    from brorl.config.reading import CHANGEABLE_ON_RESUME, unknown_setting

    command = COMMANDS[name]
    setting = option.partition("=")[0].lstrip("-").replace("-", "_")
    if not option.startswith("--"):
        return f"unexpected argument {option!r} (see brorl {name} --help)"
    if name == "resume":
        return f"--{setting} cannot be changed on resume; these settings can: {', '.join(CHANGEABLE_ON_RESUME)}"
    parameters = {key: parameter for key, (parameter, _) in _parameters_of(command).items()}
    own = [f"--{key.replace('_', '-')}" for key, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
    near = nearest(f"--{setting.replace('_', '-')}", own)
    if near or command.settings or "overrides" not in parameters:
        return f"--{setting} is not an option of brorl {name}{near or f' (see brorl {name} --help)'}"
    return unknown_setting(setting, name)


def _shown(default: Any) -> str:
    """Return a default as YAML."""
    if isinstance(default, tuple):
        return f"[{', '.join(map(_shown, default))}]"
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return str(getattr(default, "label", default))  # a source is shown by its label


def _type_name(annotation: Any) -> str:
    choices = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return "|".join(_type_name(choice) for choice in choices if choice is not NoneType)
    if choices and all(isinstance(c, str) for c in choices):
        return "|".join(choices)
    known = {int: "INT", float: "FLOAT", str: "TEXT", bool: "true|false"}
    return known.get(annotation, "VALUE")
