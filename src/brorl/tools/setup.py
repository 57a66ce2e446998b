"""A recipe's verifiers and its tools, if any. Without tools, only the settings module of this package is imported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from brorl.config.settings import TrainConfig
from brorl.errors import UserError, source_setting
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import ENVIRONMENT_DOMAIN, Question
from brorl.prompts.rendering import render
from brorl.prompts.settings import PromptFormat
from brorl.verification.domains.verifiers import make_verifiers
from brorl.verification.sandbox.pool import Workers
from brorl.verification.verifier import Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from brorl.rollout.engine import Engine
    from brorl.tools.functions import ToolRunner
    from brorl.tools.toolbox import Toolbox


def load_tools_and_verifiers(
    config: TrainConfig, domains: Iterable[str], workers: Workers
) -> tuple[ToolRunner | None, dict[str, Verifier]]:
    """Load a recipe's tools, if any, and the verifiers for the given domains. Both run in the same workers."""
    tools = load_tools(config, workers)
    environment = environment_verifier(tools)
    return tools, make_verifiers(domains, config.verification, config.rewards, workers, environment)


def load_tools(config: TrainConfig, workers: Workers) -> ToolRunner | None:
    """Load a recipe's tools; None if it has none. See `ToolRunner.from_settings`."""
    if not config.tools.enabled:
        return None
    from brorl.tools.functions import ToolRunner

    return ToolRunner.from_settings(config.tools, workers)


def make_toolbox(
    config: TrainConfig, model: str, tokenizer: PreTrainedTokenizerBase, tools: ToolRunner | None
) -> Toolbox | None:
    """Choose the call format for a model, given by name or folder; None without tools. See `Toolbox.for_run`."""
    if tools is None:
        return None
    from brorl.tools.toolbox import Toolbox

    return Toolbox.for_run(config, model, tokenizer, tools)


def environment_verifier(tools: ToolRunner | None) -> Callable[[], Verifier]:
    """Return a function that builds the environment verifier, for `make_verifiers`."""

    def make() -> Verifier:
        if tools is None or not tools.has_reward:
            lacks = "has no reward" if tools and tools.environment is not None else "is not set"
            raise UserError(
                f"the data has questions in the domain {ENVIRONMENT_DOMAIN!r}, but tools.environment {lacks}; set it "
                f"to a class with get_reward(), or set a different {source_setting('domain')}"
            )
        from brorl.tools.environments import EnvironmentVerifier

        return EnvironmentVerifier(tools)

    return make


def with_turns(engine: Engine, toolbox: Toolbox | None) -> Engine:
    """Return an engine that samples multi-turn responses, or the engine itself without tools."""
    if toolbox is None:
        return engine
    from brorl.tools.turns import TurnEngine

    return TurnEngine(engine, toolbox, toolbox.settings)


def rendered(
    questions: Sequence[Question], style: PromptFormat, tokenizer: PreTrainedTokenizerBase, toolbox: Toolbox | None
) -> list[Prompt]:
    """Turn questions into prompts that show the tools; see `brorl.prompts.rendering.render`."""
    if toolbox is None:
        return render(questions, style, tokenizer)
    return render(toolbox.observed(questions), style, tokenizer, toolbox.format.shown)
