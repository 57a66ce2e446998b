"""Reads tasksets of the library `verifiers`, version 0.4, and computes their rewards.

`brorl init verifiers:NAME` writes the tasks of one turn as rows of a data file, and a recipe whose verifier is `score`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, get_origin

from brorl.errors import UserError, option

PREFIX = "verifiers:"
SCORE = f"{__name__}:score"
_THOUGHT = "</think>"
_DECIMALS = 9  # rewards are rounded, so that weights such as 0.7, 0.2 and 0.1 add up to 1


def read_taskset(name: str, config: Mapping[str, Any], limit: int) -> Iterator[dict[str, Any]]:
    """Yield the first `limit` tasks of an installed taskset as rows of a data file; some tasksets never end.

        {"prompt": a text or messages, "answer": the task as JSON text, for `score`}

    `config` has the settings that stand under `env.taskset` in a config of `verifiers`. Raises a UserError if
    `verifiers` or the taskset is not installed, if the settings are wrong, if tasks have more than one turn or need a
    machine of their own, or if a response could get a reward above 1.
    """
    try:
        from verifiers.v1.utils.loaders import default_harness_id, environment_class
    except ImportError as error:
        raise UserError(f"{PREFIX}{name}: {error}; run: pip install 'brorl[verifiers]'") from error
    settings = {**config, "id": name}
    if str(Path.cwd()) not in sys.path:  # the workers that call `score` do the same
        sys.path.insert(0, str(Path.cwd()))
    try:
        taskset = _taskset(json.dumps(settings))
        tasks = list(islice(taskset, limit))
        problem = next(_problems(taskset, tasks), None)
        if environment_class(name).__name__ != "SingleAgentEnv" or default_harness_id(name) == name:
            problem = "has an agent or an environment of its own; brorl trains on tasks of one turn"
    except Exception as error:  # the taskset's code may raise anything, and the settings may be wrong
        why = " ".join(str(error).split()).partition(". ")[0].rstrip(".")
        raise UserError(
            f"{PREFIX}{name} cannot be read ({type(error).__name__}: {why}); install its package, and give its "
            f"settings with {option('taskset-config')}"
        ) from error
    if problem:
        raise UserError(f"{PREFIX}{name} {problem}")
    for task in tasks:
        data = task.data.model_dump(mode="json", exclude_defaults=True, exclude={"idx"})
        own = {
            "type": f"{type(task).__module__}:{type(task).__qualname__}",
            "config": task.config.model_dump(mode="json", exclude_defaults=True),
        }
        yield {"prompt": _prompt(task.data), "answer": json.dumps({"taskset": settings, **own, "data": data})}


def score(response: str, reference: str) -> float:
    """Return the sum of a task's weighted rewards for one response; `reference` is the column `answer`.

    The text up to the last `</think>` becomes the message's reasoning. Raises a ValueError unless the sum is 0 to 1.
    """
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.state import state_cls
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

    row = json.loads(reference)
    _taskset(json.dumps(row["taskset"]))  # imports the task's module
    module, _, name = row["type"].partition(":")
    kind = attrgetter(name)(import_module(module))
    task = kind(kind.data_type().model_validate(row["data"]), kind.config_type().model_validate(row["config"]))
    thought, closing, reply = response.rpartition(_THOUGHT)
    reasoning = thought.removeprefix("<think>") if closing else None
    asked = [UserMessage(content=task.data.prompt)] if isinstance(task.data.prompt, str) else list(task.data.prompt)
    system = [SystemMessage(content=task.data.system_prompt)] if task.data.system_prompt else []
    messages = [*system, *asked, AssistantMessage(content=reply, reasoning_content=reasoning)]
    trace = Trace(
        task=TraceTask(type=kind.__name__, data=task.data, key=task.key, hash=task.hash),
        agent=AgentInfo(config=AgentConfig()),
        state=state_cls(kind)(),
        nodes=[
            MessageNode(parent=place - 1 if place else None, message=message, sampled=place == len(messages) - 1)
            for place, message in enumerate(messages)
        ],
        is_completed=True,
        ok=True,
    )
    asyncio.run(task.score(trace))
    reward = round(float(trace.reward), _DECIMALS)
    if not 0 <= reward <= 1:
        parts = ", ".join(f"{name}: {part.value:g}" for name, part in trace.rewards.items() if part is not None)
        raise ValueError(f"the rewards add up to {reward:g}, not to a number from 0 to 1 ({parts})")
    return reward


@lru_cache(maxsize=8)
def _taskset(settings: str) -> Any:
    """Make a taskset from its settings as JSON text."""
    from verifiers.v1.utils.loaders import taskset_class, taskset_config_type

    config = json.loads(settings)
    return taskset_class(config["id"])(taskset_config_type(config["id"]).model_validate(config))


def _problems(taskset: Any, tasks: list[Any]) -> Iterator[str]:
    """Yield each reason why one response to one prompt does not decide a taskset's rewards."""
    if not tasks:
        yield f"has no tasks; change its settings with {option('taskset-config')}"
    if type(taskset).toolsets(taskset.config):
        yield "has tools; brorl trains on tasks of one turn"
    for task in {(type(task), task.config.model_dump_json()): task for task in tasks}.values():
        yield from _problems_of_rewards(task)
    for data in (task.data for task in tasks):
        name = f"has the task {data.id or data.name or data.idx}, whose"
        if not data.prompt:
            yield f"{name} conversation begins with a simulated user; brorl trains on tasks with a prompt"
        elif not isinstance(data.prompt, str):
            if any(not isinstance(message.content, str) for message in data.prompt):
                yield f"{name} prompt has images or parts; brorl trains on texts"
            if data.prompt[-1].role != "user":
                yield f"{name} prompt does not end with a message of the user"


def _problems_of_rewards(task: Any) -> Iterator[str]:
    from verifiers.v1.task import Task

    kind = type(task)
    if "<locals>" in kind.__qualname__:
        yield f"has tasks of the class {kind.__qualname__}; define it at the top level of a module"
    if kind.NEEDS_CONTAINER or any(getattr(kind, name) is not getattr(Task, name) for name in ("setup", "finalize")):
        yield "prepares a machine for its tasks; brorl trains on tasks of one turn that need none"
    if kind.toolsets(task.config):
        yield "has tools; brorl trains on tasks of one turn"
    rewards = task.hooks("reward")
    for reward in rewards:
        runtime = inspect.signature(reward).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            yield f"has the reward {reward.__name__}, which runs on a machine of the task; brorl has none"
        returned = inspect.signature(reward, eval_str=True).return_annotation
        if inspect.isclass(get_origin(returned) or returned) and issubclass(get_origin(returned) or returned, Mapping):
            yield f"has the reward {reward.__name__}, which returns several numbers without a bound; return their sum"
    weights = {reward.__name__: float(getattr(reward, "_vf_weight", 1.0)) for reward in rewards}
    weights |= {judge.reward_name: float(judge.config.weight) for judge in task.plugged_judges()}
    if not weights:
        yield "has no rewards"
    most = sum(max(weight, 0.0) for weight in weights.values())
    if round(most, _DECIMALS) > 1:
        listed = ", ".join(f"{name}: {weight:g}" for name, weight in weights.items())
        smaller = f"{{task: {{rewards: {{{next(iter(weights))}: {{weight: 0.5}}}}}}}}"
        yield (
            f"has rewards of up to {most:g} together ({listed}), and 1 means correct; lower their weights: "
            f"{option('taskset-config', smaller)}"
        )


def _prompt(data: Any) -> str | list[dict[str, str]]:
    """Return a task's prompt: a text, or messages if there are several or a system prompt."""
    if isinstance(data.prompt, str) and not data.system_prompt:
        return data.prompt
    asked = [("user", data.prompt)] if isinstance(data.prompt, str) else [(m.role, m.content) for m in data.prompt]
    system = [("system", data.system_prompt)] if data.system_prompt else []
    return [{"role": role, "content": content} for role, content in (*system, *asked)]
