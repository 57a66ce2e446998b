"""Calls a user's function on one response, in the style that its parameter names indicate.

A response's values are given by role: `response`, `reference`, `prompt` (the question), `text` (the text given to the
model), `source` (the data source's name) and `as_messages`. A function with a `completions` parameter is called in
TRL's style, one with `queries` and `labels` in OpenRLHF's. Any other function receives one value per parameter: by
parameter name, as in verl, and otherwise in the order response, reference, prompt. Ambiguous functions are rejected.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

Function = Callable[..., Any]
Parameter = inspect.Parameter
RESPONSE, REFERENCE, PROMPT, TEXT, SOURCE, EXTRA = "response", "reference", "prompt", "text", "source", "extra_info"
_BY_POSITION = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_OF_OPENRLHF = ("queries", "prompts", "labels")
_REFERENCE_COLUMNS = ("answer", "solution", "ground_truth", "reference")  # columns that TRL's functions often read
# A parameter's role is the first of these that lists its name or a word in its name.
_NAMES = {
    SOURCE: {"data_source"},
    EXTRA: {"extra_info"},
    REFERENCE: {
        "reference", "ref", "truth", "groundtruth", "gt", "gold", "golden", "target", "label", "expected", "correct",
        "true", "key",
    },
    RESPONSE: {
        "response", "solution_str", "completion", "output", "prediction", "predict", "predicted", "pred", "generation",
        "generated", "rollout", "reply", "hypothesis", "candidate", "guess", "attempt", "submission", "student",
    },
    PROMPT: {"prompt", "question", "query", "problem", "instruction", "input", "task", "puzzle", "request"},
}  # fmt: skip


def takes(function: Function) -> list[str]:
    """Return the roles of the values that a function takes; ValueError, with the reason, if it cannot be called."""
    trainer = _trainer(function)
    if trainer == "TRL":
        return [RESPONSE, REFERENCE, PROMPT]
    if trainer == "OpenRLHF":
        parameters = signature(function).parameters
        for name, parameter in parameters.items():
            if _is_required(parameter) and name not in _OF_OPENRLHF:
                raise ValueError(f"it is unclear what to pass as its parameter {name!r}")
        return [RESPONSE, REFERENCE, TEXT]
    roles = _roles(function)
    try:  # a wrapper may take different arguments than the wrapped function
        args, named = _arguments(function, dict.fromkeys(roles))
        inspect.signature(function, follow_wrapped=False).bind(*args, **named)
    except TypeError as error:
        raise ValueError(f"its decorator does not take these arguments ({error})") from None
    return [role for role in roles.values() if role != EXTRA]


def called(function: Function, given: Mapping[str, Any]) -> Any:
    """Call a function on one response. Return its value or, from a trainer-style list, the only reward."""
    trainer = _trainer(function)
    if trainer == "TRL":
        return _only(result(function(**_trl_arguments(function, given))))
    if trainer == "OpenRLHF":
        text = given[TEXT]
        lists = dict(zip(_OF_OPENRLHF, ([text + given[RESPONSE]], [text], [given[REFERENCE]]), strict=True))
        names = signature(function).parameters
        value = result(function(**{name: values for name, values in lists.items() if name in names}))
        return _only(value["rewards"] if isinstance(value, Mapping) and "rewards" in value else value)
    roles = _roles(function)
    row = {}
    if len(columns_of_verl(function)) > 1:  # the answer column can contain verl's other columns too
        row = _object(given[REFERENCE])
        row = row if "ground_truth" in row else {}
    known = {
        **given,
        SOURCE: row.get("data_source", given.get(SOURCE)),
        REFERENCE: row.get("ground_truth", given.get(REFERENCE)),
        EXTRA: row.get("extra_info") or {},
    }
    args, named = _arguments(function, {name: known[role] for name, role in roles.items()})
    value = result(function(*args, **named))
    if "solution_str" in roles and isinstance(value, Mapping) and "score" in value:  # verl's other keys are metrics
        value = {"score": value["score"]} | ({"correct": value["acc"]} if isinstance(value.get("acc"), bool) else {})
    return value


def result(value: Any) -> Any:
    """Return a function's value, after awaiting it if necessary. All coroutines run in one event loop."""
    return _runner().run(_awaited(value)) if inspect.isawaitable(value) else value


async def _awaited(value: Awaitable[object]) -> object:
    return await value


@cache
def _runner() -> asyncio.Runner:
    import asyncio

    return asyncio.Runner()


def signature(function: Function) -> inspect.Signature:
    """Return a function's signature; for a wrapper that takes any arguments, the signature of the wrapped function."""
    while True:
        outer = inspect.signature(function, follow_wrapped=False)
        kinds = {parameter.kind for parameter in outer.parameters.values()}
        is_open = not kinds.isdisjoint((Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD))
        if not is_open or not hasattr(function, "__wrapped__"):
            return outer
        function = function.__wrapped__


def required_columns(function: Function) -> list[str]:
    """Return the columns that a function with TRL's signature requires; none for other functions."""
    try:
        parameters = signature(function).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in _columns(parameters) if parameters[name].default is Parameter.empty]


def columns_of_verl(function: Function) -> list[str]:
    """Return the columns that a function with verl's signature can take in addition to the response, answer first."""
    try:
        roles = {} if _trainer(function) else _roles(function)
    except ValueError:
        return []
    return ["ground_truth", *(name for name, role in roles.items() if role in (SOURCE, EXTRA))]


def _trainer(function: Function) -> str | None:
    """Return the trainer whose list-based signature a function has; None if the function takes one response."""
    try:
        names = signature(function).parameters
    except (TypeError, ValueError):  # some C functions have no signature
        return None
    return "TRL" if "completions" in names else "OpenRLHF" if "queries" in names else None


def _role(name: str) -> str | None:
    """Return the role that a parameter's name indicates."""
    words = {name.lower(), *re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())}
    return next((role for role, names in _NAMES.items() if words & names), None)


def _roles(function: Function) -> dict[str, str]:
    """Return the role of each parameter that receives a value, in parameter order."""
    try:
        parameters = signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ValueError(f"its parameters cannot be read ({error})") from None
    _check_takes_one_response(parameters)
    required = [name for name, parameter in parameters.items() if _is_required(parameter)]
    positional = [name for name, parameter in parameters.items() if parameter.kind in _BY_POSITION]
    roles = _named_roles([*required, *positional])
    # The other parameters take the missing roles in order. If no name indicates a role, a required third parameter is
    # the question: `a, b, c` is response, reference, prompt, but in `a, b, c=1`, c is an option.
    missing = [role for role in (RESPONSE, REFERENCE) if role not in roles.values()]
    if not roles and {*positional[2:3]} <= {*required}:
        missing.append(PROMPT)
    unnamed = [name for name in positional if not _role(name)]
    roles |= zip(unnamed, missing, strict=False)
    if doubtful := [name for name in required if name not in roles]:
        raise ValueError(f"it is unclear what to pass as its parameter {doubtful[0]!r}")
    if RESPONSE not in roles.values() or not {REFERENCE, PROMPT} & {*roles.values()}:
        raise ValueError("its parameters do not name a response and a reference")
    return {name: roles[name] for name in parameters if name in roles}


def _check_takes_one_response(parameters: Mapping[str, Parameter]) -> None:
    for name in parameters:
        if name.endswith("s") and _role(name[:-1]) == RESPONSE and _role(name) is None:
            raise ValueError(f"its parameter {name!r} is a list, but it is called on one response")
    kinds = [parameter.kind for parameter in parameters.values()]
    if Parameter.VAR_POSITIONAL in kinds and len(kinds) <= 2:
        raise ValueError("it takes any number of arguments; if a decorator made it, use functools.wraps there")


def _named_roles(names: Iterable[str]) -> dict[str, str]:
    """Return the roles that names indicate. Each role goes to the first name that indicates it."""
    roles: dict[str, str] = {}
    for name in names:
        role = _role(name)
        if role and role not in roles.values():
            roles[name] = role
    return roles


def _is_required(parameter: Parameter) -> bool:
    kinds = (*_BY_POSITION, Parameter.KEYWORD_ONLY)
    return parameter.kind in kinds and parameter.default is Parameter.empty


def _arguments(function: Function, value_of: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional arguments, and keyword arguments for everything after a parameter without a value."""
    args: list[Any] = []
    by_name: dict[str, Any] = {}
    for place, (name, parameter) in enumerate(signature(function).parameters.items()):
        if name in value_of and parameter.kind in _BY_POSITION and place == len(args):
            args.append(value_of[name])
        elif name in value_of:
            by_name[name] = value_of[name]
    return args, by_name


def _columns(parameters: Mapping[str, Parameter]) -> list[str]:
    """Return the parameters of a function with TRL's signature that are data columns."""
    if "completions" not in parameters:
        return []
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    no_columns = ("completions", "prompts", "completion_ids", "trainer_state")
    return [name for name, parameter in parameters.items() if name not in no_columns and parameter.kind in kinds]


def _trl_arguments(function: Function, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments for calling a function with TRL's signature on one response.

        reward(completions, target): target=[reference]
        reward(completions, numbers, target): the reference is the JSON object {"numbers": ..., "target": ...}
        reward(completions, **columns): answer, solution, ground_truth and reference are all [reference]

    Raises a ValueError if a column is missing.
    """
    response, reference, prompt = given[RESPONSE], given[REFERENCE], given[PROMPT]
    as_messages = given["as_messages"]
    always: dict[str, Any] = {
        "completions": [[{"role": "assistant", "content": response}] if as_messages else response],
        "prompts": [[{"role": "user", "content": prompt}] if as_messages else prompt],
        "completion_ids": [[]],
        "trainer_state": None,
    }
    parameters = signature(function).parameters
    columns = _columns(parameters)
    required = required_columns(function)
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {name: value for name, value in always.items() if open_ended or name in parameters}
    if len(required) > 1:
        row = _object(reference)
        if not set(required) <= set(row):
            raise ValueError(
                f"the function needs the columns {', '.join(required)}: the answer column must contain a JSON object "
                "with them"
            )
        arguments |= {name: [row[name]] for name in required}
    else:
        arguments |= {name: [reference] for name in required or [n for n in columns if n in _REFERENCE_COLUMNS]}
    if open_ended:
        arguments |= {name: [reference] for name in _REFERENCE_COLUMNS if name not in arguments}
    return arguments


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object; return an empty one if the text is anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _only(rewards: Any) -> Any:
    """Return the only reward in a list, an array or a tensor."""
    if hasattr(rewards, "tolist"):
        rewards = rewards.tolist()
    if not isinstance(rewards, list | tuple) or len(rewards) != 1:
        raise ValueError(f"a reward function must return a list with one reward per completion, not {rewards!r:.80}")
    return rewards[0]
