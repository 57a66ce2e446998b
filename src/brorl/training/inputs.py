"""The checked inputs of a run: data, verifiers, tokenizer, prompts, and the memory that the run needs.

Cheap checks come first; the model's weights are not loaded. A prompt that the tokenizer cannot encode, or that does not
fit in the model's context, is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.evaluation.questions import (
    all_questions,
    build_questions,
    check_domain_names,
    check_split,
    find_unreadable,
    reading_lines,
    removed_lines,
    unreadable_lines,
)
from brorl.format import counted
from brorl.model.context_limit import attention_limit
from brorl.model.device import available_bytes, bfloat16_slowdown
from brorl.model.load import check_vocabulary, choose_device, load_tokenizer
from brorl.model.memory_choices import MemoryChoices
from brorl.model.memory_prediction import MemoryPrediction, check_prediction, predict_memory
from brorl.model.memory_settings import MemorySettings, Workload
from brorl.model.source import find_model, read_config
from brorl.prompts.prompt import Prompt
from brorl.prompts.question import INSTRUCTIONS_DOMAIN
from brorl.prompts.rendering import drop_long, model_positions, prompt_problems
from brorl.prompts.source_questions import SourceQuestions
from brorl.prompts.stream import PromptStream
from brorl.rollout.chosen_engine import check_cache, check_engine, set_threads_and_kernels
from brorl.seeds import derived_seed
from brorl.table import Table
from brorl.tools.setup import load_tools_and_verifiers, make_toolbox, rendered
from brorl.training.collector import MAX_STEPS_PER_ROUND
from brorl.verification.domains.verifiers import sandbox_lines
from brorl.verification.grade import Grader
from brorl.verification.sandbox.pool import Workers
from brorl.verification.thoughts import make_decode
from brorl.verification.verifier import unreadable_references

if TYPE_CHECKING:
    from brorl.tools.toolbox import Toolbox


def check_memory(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    prompts: RunPrompts,
    show: Callable[[Table], None] | None = None,
) -> tuple[MemoryPrediction, str | None]:
    """Predict the memory of a run, without loading its model.

    If the run fits and the free memory is known, `show` receives a table of ways to train and their memory.

    Returns:
        The prediction, and a warning if the run fits only while responses stay below the length limit.

    Raises:
        UserError: If even the minimum memory exceeds the free memory (the message names the smallest change that fits),
            or if vLLM's cache is too small for a single response.
    """
    settings = _memory_settings(config)
    workload = _workload(config, prompts)
    # on a cluster, the parts of a run are on different machines
    available = None if config.cluster.enabled else available_bytes(choose_device(config.device))
    prediction = predict_memory(model_config, settings, workload, available)
    check_cache(config, prediction.row_bytes)
    if available is None:
        return prediction, None
    warning = check_prediction(
        prediction, available, lambda: MemoryChoices(model_config, settings, workload, available).fix()
    )
    if show is not None:
        show(MemoryChoices(model_config, settings, workload, available).table())
    return prediction, warning


def _memory_settings(config: TrainConfig) -> MemorySettings:
    """Return the recipe settings that determine a run's memory."""
    device = choose_device(config.device).type
    has_reference, offloaded = config.kl.coefficient > 0, config.reference.offload and device != "cpu"
    return MemorySettings(
        dtype=config.dtype,
        engine_bytes=config.engine.memory_bytes,
        lora=config.adapters,
        reference=has_reference and not offloaded,
        offloaded_reference=has_reference and offloaded,
        average=config.optimizer.ema_decay is not None,
        states=config.optimizer.states,
        nodes_per_pass=config.engine.nodes_per_pass,
        gradient_checkpointing=config.engine.gradient_checkpointing,
        forward=config.engine.forward,
        attention=config.engine.attention,
        device=device,
        separate_engine=config.engine.kind == "vllm",
        engine_apart=config.engine.vllm.placement == "apart",
        engine_rows=config.engine.vllm.max_rows,
        graphs=config.engine.cuda_graphs,
    )


def _workload(config: TrainConfig, prompts: RunPrompts) -> Workload:
    steps_at_once = MAX_STEPS_PER_ROUND if config.dynamic_sampling.enabled else 1
    return Workload(
        prompt_tokens=prompts.longest_tokens,
        max_new_tokens=max(config.response_limits.values()),
        num_rows=max(
            steps_at_once * config.samples_per_step, len(prompts.held_out) * config.evaluation.rollouts_per_prompt
        ),
        num_prompts=-(-config.prompts_per_step // config.optimizer.mini_batches),
    )


@dataclass(frozen=True)
class ModelInputs:
    """The inputs that a learner needs."""

    model_path: str  # name or folder of the model or checkpoint
    tokenizer: PreTrainedTokenizerBase
    context: int  # total tokens of the longest prompt and the longest response


@dataclass(frozen=True)
class RunInputs(ModelInputs):
    """The checked inputs of a run, all known before the model is loaded."""

    prompts: RunPrompts  # training and held-out prompts
    grader: Grader  # verifies and rewards responses
    toolbox: Toolbox | None  # the tools that responses can call
    workers: Workers  # processes in which the verifiers run
    memory: MemoryPrediction  # the memory that the run will need
    memory_line: str  # the predicted memory, or a warning, for the user
    notes: Sequence[str] = ()  # lines about dropped rows, and unreadable reference answers of public datasets


def prepare_run(config: TrainConfig, model_path: str, show: Callable[[Table], None] | None = None) -> RunInputs:
    """Read, check and encode the data, and check that memory suffices. The first problem raises a UserError."""
    torch.manual_seed(derived_seed(config.seed, 0))  # on a CPU torch uses only the low 32 bits
    _check_device(config)
    check_engine(config, config.sampling.params)
    model_config = read_config(find_model(model_path))
    sources = build_questions(config)
    questions = all_questions(sources)
    workers = Workers.from_settings(config.verification)
    tools, verifiers = load_tools_and_verifiers(config, {question.domain for question in questions}, workers)
    check_domain_names(config, verifiers)
    check_split(config, sources)
    tokenizer = load_tokenizer(model_path, config.sampling.stop)
    check_vocabulary(config.model, model_config, tokenizer)
    toolbox = make_toolbox(config, model_path, tokenizer, tools)
    prompts = build_prompts(config, render_sources(config, sources, tokenizer, toolbox), tokenizer, model_config)
    context = prompts.longest_tokens + max(config.response_limits.values())
    check_attention_limit(config, model_config, context)
    memory, warning = check_memory(config, model_config, prompts, show)
    set_threads_and_kernels(config, memory.num_weights)
    notes = reading_lines(sources)
    if model_path == config.model:  # a resumed run has been checked already
        notes += unreadable_lines(find_unreadable(verifiers, sources))
    elif INSTRUCTIONS_DOMAIN in verifiers:  # this machine may lack the package that some instructions need
        unreadable_references({INSTRUCTIONS_DOMAIN: verifiers[INSTRUCTIONS_DOMAIN]}, questions)
    decode = make_decode(tokenizer, config.verification.thoughts, config.sampling.stop)
    grader = Grader(
        verifiers, decode, config.rewards, config.longest_response, config.verification.sees,
        toolbox.calls_text if toolbox else None,
    )  # fmt: skip
    return RunInputs(
        model_path=model_path,
        tokenizer=tokenizer,
        context=context,
        prompts=prompts,
        grader=grader,
        toolbox=toolbox,
        workers=workers,
        memory=memory,
        memory_line=memory.summary if warning is None else f"warning: {warning}",
        notes=notes,
    )


def _check_device(config: TrainConfig) -> None:
    if choose_device(config.device).type != "cpu" and config.engine.clock == "cpu":
        raise UserError("engine.clock = cpu cannot measure the time of a GPU; set device: cpu, or engine.clock: wall")
    if config.cluster.enabled and config.device.startswith("cuda") and not config.cluster.gpus_per_learner_rank:
        raise UserError(
            f"device = {config.device} needs GPUs, but cluster.gpus_per_learner_rank = 0 learns on CPUs; set "
            "cluster.gpus_per_learner_rank: 1, or device: auto"
        )


def check_attention_limit(config: TrainConfig, model_config: PreTrainedConfig, context: int) -> None:
    """If tree attention is required, check that prompt and response fit in the model's attention window."""
    span = attention_limit(model_config)
    if config.engine.forward == "tree" and span is not None and span.tokens < context:
        raise UserError(
            f"a prompt and a response can have {context:,} tokens together, but the {span.name} of {config.model} "
            f"has {span.tokens:,}, which tree attention does not support; set engine.forward: auto, or lower "
            "sampling.max_new_tokens and data.max_prompt_tokens"
        )


def input_lines(inputs: RunInputs, config: TrainConfig) -> list[str]:
    """Return lines for the user about the sandbox, dropped data and predicted memory."""
    lines = sandbox_lines(config.verification, inputs.grader.verifiers, config.tools.untrusted)
    lines += inputs.notes
    lines += removed_lines(inputs.prompts.num_too_long, inputs.prompts.num_evaluated_on, config)
    if not config.cluster.enabled and config.cluster.model_dump(exclude_defaults=True):
        lines.append("cluster.nodes = 0: the run has one process, so the other `cluster` settings have no effect")
    lines += format_lines(config)
    num_train = inputs.prompts.train.num_prompts
    if num_train < config.prompts_per_step:
        lines.append(
            f"warning: prompts_per_step = {config.prompts_per_step:,} exceeds the "
            f"{counted(num_train, 'training prompt')}, so steps repeat prompts; lower prompts_per_step, or add data"
        )
    return [*lines, inputs.memory_line]


_SLOW = 3.0  # warn if bfloat16 takes this many times as long as float32


def format_lines(config: TrainConfig) -> list[str]:
    """Return warnings about a number format that is slow on the learner's device."""
    on_a_gpu = learner_device(config).startswith("cuda")
    corrected = config.importance.correction != "none"
    if on_a_gpu and config.dtype == "float32":
        correct = "" if corrected else " and importance.correction: truncate"
        return [f"warning: dtype = float32 leaves the tensor cores of the GPU idle; set dtype: bfloat16{correct}"]
    if on_a_gpu or "bfloat16" not in (config.dtype, config.engine.dtype) or (slowdown := bfloat16_slowdown()) < _SLOW:
        return []
    name, fix = ("dtype", "float32") if config.dtype == "bfloat16" else ("engine.dtype", "auto")
    correct = " and importance.correction: none" if name == "dtype" and corrected else ""
    return [
        f"warning: {name} = bfloat16 is slow on this processor: a matrix product takes {slowdown:.0f} times as long "
        f"as in float32; set {name}: {fix}{correct}"
    ]


def learner_device(config: TrainConfig) -> str:
    """Return the device of the learner."""
    if config.cluster.enabled:
        return "cuda" if config.cluster.gpus_per_learner_rank else "cpu"
    return str(choose_device(config.device))


@dataclass(frozen=True)
class RunPrompts:
    """The prompts of a run."""

    train: PromptStream  # training prompts, in training order
    held_out: Sequence[Prompt]  # prompts to evaluate on
    longest_tokens: int  # tokens in the longest prompt
    num_too_long: int  # prompts dropped by `data.max_prompt_tokens`
    num_evaluated_on: int  # training questions dropped because another source evaluates on them


class SourcePrompts(NamedTuple):
    """The prompts of a source, including those longer than `data.max_prompt_tokens`."""

    source: SourceQuestions
    train: list[Prompt]
    held_out: list[Prompt]

    def short(self, max_tokens: int) -> SourcePrompts:
        """Return the prompts with at most `max_tokens` tokens; 0 keeps all."""
        return SourcePrompts(self.source, drop_long(self.train, max_tokens), drop_long(self.held_out, max_tokens))


def render_sources(
    config: TrainConfig,
    sources: Sequence[SourceQuestions],
    tokenizer: PreTrainedTokenizerBase,
    toolbox: Toolbox | None = None,
) -> list[SourcePrompts]:
    """Turn the sources' questions into prompts, which describe the tools if there are any."""
    return [
        SourcePrompts(
            source,
            rendered(source.train, config.prompt, tokenizer, toolbox),
            rendered(source.held_out, config.prompt, tokenizer, toolbox),
        )
        for source in sources
    ]


def build_prompts(
    config: TrainConfig,
    sources: Sequence[SourcePrompts],
    tokenizer: PreTrainedTokenizerBase,
    model_config: PreTrainedConfig,
) -> RunPrompts:
    """Order a run's prompts. A prompt that cannot be encoded or does not fit in the model raises a UserError."""
    maximum = config.data.max_prompt_tokens
    positions = model_positions(model_config)
    too_long = f"has more than data.max_prompt_tokens = {maximum} tokens"
    short_sources = [source.short(maximum) for source in sources]
    for all_prompts, (source, train, held_out) in zip(sources, short_sources, strict=True):
        problems = prompt_problems(
            config.model, [*train, *held_out], config.response_limits, tokenizer, model_config,
            ", or set data.max_prompt_tokens",
        )  # fmt: skip
        if problem := next(problems, None):
            raise UserError(problem)
        if all_prompts.train and not train:
            raise UserError(f"every prompt of {source.name} {too_long}; {_room(all_prompts.train, config, positions)}")
    train_prompts = [prompt for source_prompts in short_sources for prompt in source_prompts.train]
    held_out_prompts = [prompt for source_prompts in short_sources for prompt in source_prompts.held_out]
    if config.evaluation.num_prompts and not held_out_prompts:
        fix = _room([prompt for source in sources for prompt in source.held_out], config, positions)
        raise UserError(f"every held-out prompt {too_long}; {fix}, or set evaluation.num_prompts: 0")
    try:
        weights = {source.name: source.weight for source, train, _ in short_sources if train}
        stream = PromptStream(train_prompts, config.seed, weights)
    except ValueError as error:
        raise UserError(f"data.sources: {error}") from error
    longest_tokens = max(len(prompt.token_ids) for prompt in (*train_prompts, *held_out_prompts))
    num_read = sum(len(source.train) + len(source.held_out) for source in sources)
    num_too_long = num_read - len(train_prompts) - len(held_out_prompts)
    num_evaluated_on = sum(source_prompts.source.num_evaluated_on for source_prompts in sources)
    return RunPrompts(stream, held_out_prompts, longest_tokens, num_too_long, num_evaluated_on)


def _room(prompts: Sequence[Prompt], config: TrainConfig, positions: int | None) -> str:
    """Return a fix for prompts that are too long: a higher limit, unless the model has too few positions."""
    shortest = min(len(prompt.token_ids) for prompt in prompts)
    setting, response = max(config.response_limits.items(), key=lambda item: item[1])
    if not positions or shortest + response <= positions:
        return f"raise it to {shortest} or more, the length of the shortest one"
    room = f"the shortest one has {shortest} tokens, and {config.model} has {positions} positions for a prompt and"
    if shortest < positions:
        lower = f"lower {setting} to {positions - shortest}, and raise data.max_prompt_tokens"
        return f"{room} {setting} = {response}: {lower}"
    return f"{room} its response: choose a model with more positions, or shorten the questions or prompt.template"
