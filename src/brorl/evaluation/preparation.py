"""An evaluation's inputs, checked before the model is loaded; the cheapest checks come first."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from brorl.config.settings import TrainConfig
from brorl.errors import UserError, option
from brorl.evaluation.datasets import EvaluationRequest, read_datasets
from brorl.evaluation.evaluator import PromptBatch, split_into_batches
from brorl.evaluation.questions import all_questions, find_unreadable, reading_lines, unreadable_lines
from brorl.model.device import available_bytes
from brorl.model.load import check_vocabulary, choose_device, load_tokenizer
from brorl.model.memory_prediction import MemoryLine, MemoryPrediction, check_prediction, predict_memory
from brorl.model.memory_settings import MemorySettings, Workload
from brorl.model.source import find_model, read_config
from brorl.prompts.prompt import Prompt, fingerprint
from brorl.prompts.rendering import drop_long, prompt_problems
from brorl.prompts.settings import PromptFormat
from brorl.prompts.source_questions import SourceQuestions
from brorl.rollout.chosen_engine import check_cache, check_engine, set_threads_and_kernels
from brorl.sampling import SamplingParams
from brorl.storage import function_file, size_and_sum
from brorl.tools.setup import load_tools_and_verifiers, make_toolbox, rendered
from brorl.verification.domains.verifiers import sandbox_lines
from brorl.verification.sandbox.pool import Workers
from brorl.verification.settings import VerificationSettings
from brorl.verification.verifier import Verifier

if TYPE_CHECKING:
    from brorl.tools.toolbox import Toolbox

_BATCH_TOKENS, _MIN_PROMPTS, _MAX_PROMPTS = 2**19, 8, 64
MAX_RESPONSE_LENGTH = 32_768  # the paper's context


class EvaluationInputs(NamedTuple):
    """Everything that an evaluation needs, except the loaded model."""

    request: EvaluationRequest
    tokenizer: PreTrainedTokenizerBase
    batches: list[PromptBatch]  # all prompts, in batches
    verifiers: Mapping[str, Verifier]  # by domain
    toolbox: Toolbox | None  # the tools that responses can call
    sampling: SamplingParams
    settings: dict[str, Any]  # everything that determines responses and verdicts, except the weights, as JSON values
    unreadable: dict[str, list[str]]  # dataset -> ids of questions whose reference answer the verifier cannot read
    notes: list[str]  # lines for the user

    @property
    def context(self) -> int:
        """Length in tokens of the longest prompt plus the longest possible response."""
        longest = max(len(prompt.token_ids) for batch in self.batches for prompt in batch.prompts)
        return longest + self.request.config.tools.total_tokens(self.sampling.max_new_tokens)


def prepare_evaluation(request: EvaluationRequest) -> EvaluationInputs:
    """Read, check and encode the data, and check that there is enough memory."""
    config = request.config
    device = choose_device(config.device)
    check_engine(config)
    model_config = read_config(find_model(config.model))
    sets = read_datasets(request)
    domains = {question.domain for question in all_questions(sets)}
    tools, verifiers = load_tools_and_verifiers(config, domains, Workers.from_settings(config.verification))
    tokenizer = load_tokenizer(config.model, config.sampling.stop)
    check_vocabulary(config.model, model_config, tokenizer)
    toolbox = make_toolbox(config, config.model, tokenizer, tools)
    prompts_of, notes = _render(sets, request, tokenizer, toolbox)
    limit = _response_limit(request, prompts_of, model_config)
    if (minimum := config.evaluated_sampling.min_new_tokens) >= limit:
        raise UserError(
            f"every response would be truncated: it has at least {minimum} tokens and at most {limit}; lower "
            f"{option('evaluation.min_new_tokens')}"
        )
    all_prompts = [prompt for prompts in prompts_of.values() for prompt in prompts]
    longest_response = config.tools.total_tokens(limit)
    limits = {"tools.max_response_tokens" if toolbox else option("max-new-tokens"): longest_response}
    problems = prompt_problems(config.model, all_prompts, limits, tokenizer, model_config)
    if problem := next(problems, None):
        raise UserError(problem)
    set_threads_and_kernels(config, _check_memory(config, model_config, prompts_of, longest_response))
    unreadable = find_unreadable(verifiers, sets)
    notes += sandbox_lines(config.verification, verifiers, config.tools.untrusted)
    notes += reading_lines(sets)
    notes += unreadable_lines(unreadable)
    sampling = replace(config.evaluated_sampling, max_new_tokens=limit)
    settings = _settings(request, sets, prompts_of, verifiers, sampling, device)
    return EvaluationInputs(
        request=request,
        tokenizer=tokenizer,
        batches=split_into_batches(prompts_of, settings["prompts_per_part"], config.seed),
        verifiers=verifiers,
        toolbox=toolbox,
        sampling=sampling,
        settings=settings,
        unreadable={name: [question.id for question, _ in questions] for name, questions in unreadable.items()},
        notes=notes,
    )


def prompts_per_batch(num_rollouts: int, max_new_tokens: int) -> int:
    """Return the number of prompts per batch. With long responses, batches are smaller, so a kill loses less work."""
    return min(_MAX_PROMPTS, max(_MIN_PROMPTS, _BATCH_TOKENS // (num_rollouts * max_new_tokens)))


def _render(
    sets: Sequence[SourceQuestions],
    request: EvaluationRequest,
    tokenizer: PreTrainedTokenizerBase,
    toolbox: Toolbox | None,
) -> tuple[dict[str, list[Prompt]], list[str]]:
    """Return the prompts by dataset, and notes about dropped prompts and added instructions."""
    prompts_of: dict[str, list[Prompt]] = {}
    names_of: dict[str, list[str]] = {}  # text that a default template adds -> names of the datasets
    notes: list[str] = []
    longest = request.config.data.max_prompt_tokens
    for source in sets:
        style = request.format_of(source)
        every = rendered(source.held_out, style, tokenizer, toolbox)
        prompts = every if request.data else drop_long(every, longest)
        if dropped := len(every) - len(prompts):
            notes.append(f"{source.name}: dropped {dropped} prompts of more than {longest} tokens, as in the run")
        if not prompts:
            raise UserError(f"{source.name} has no prompts to evaluate; choose different data")
        prompts_of[source.name] = prompts
        for template in () if style is request.config.prompt else {*style.domain_templates.values()}:
            if added := template.replace("{prompt}", "").strip():
                names_of.setdefault(added, []).append(source.name)
    notes += [
        f"added to each question of {', '.join(names)}: {added!r} (change it with prompt.template)"
        for added, names in names_of.items()
    ]
    return prompts_of, notes


def _response_limit(
    request: EvaluationRequest, prompts_of: Mapping[str, Sequence[Prompt]], model_config: PreTrainedConfig
) -> int:
    """Return the response length limit: the user's, the run's, or the context of the model, at most the paper's."""
    config = request.config
    if config.evaluation.max_new_tokens:
        return config.evaluation.max_new_tokens
    if request.belongs_to_run:
        return config.sampling.max_new_tokens
    text_config = model_config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or MAX_RESPONSE_LENGTH
    window = getattr(text_config, "sliding_window", None) or positions
    longest = max(len(prompt.token_ids) for prompts in prompts_of.values() for prompt in prompts)
    return max(1, min(MAX_RESPONSE_LENGTH, min(positions, window) - longest))


def _check_memory(
    config: TrainConfig, model_config: PreTrainedConfig, prompts_of: Mapping[str, Sequence[Prompt]], limit: int
) -> int:
    """Check that the weights and the responses fit in memory. Return the number of weights."""
    device = choose_device(config.device)
    num_rollouts = config.evaluation.rollouts_per_prompt
    largest = min(prompts_per_batch(num_rollouts, limit), max(map(len, prompts_of.values())))
    longest = max(len(prompt.token_ids) for prompts in prompts_of.values() for prompt in prompts)
    settings = MemorySettings(
        config.dtype,
        config.engine.memory_bytes,
        forward=config.engine.forward,
        separate_engine=config.engine.kind == "vllm",
        engine_apart=config.engine.vllm.placement == "apart",
        engine_rows=config.engine.vllm.max_rows,
        device=device.type,
    )
    training = predict_memory(model_config, settings, Workload(longest, limit, num_rows=largest * num_rollouts))
    check_cache(config, training.row_bytes)
    weights = training.kept[0].num_bytes // (2 if config.dtype == "bfloat16" else 1)  # trained weights are float32
    smaller = option("dtype", "bfloat16") if config.dtype != "bfloat16" else "a smaller model"
    engine_lines = ("sampling copy", "sampling cache") if settings.separate_engine else ("joined weights",)
    engine = [line for line in training.kept if line.name in engine_lines]
    kept = (MemoryLine("weights", weights, smaller), *engine)
    available = None if config.cluster.enabled else available_bytes(device)  # other machines hold the model
    check_prediction(MemoryPrediction(kept, training.sampling, MemoryLine("learning", 0, ""), available), available)
    return training.num_weights


def _settings(
    request: EvaluationRequest,
    sets: Sequence[SourceQuestions],
    prompts_of: Mapping[str, Sequence[Prompt]],
    domains: Container[str],
    sampling: SamplingParams,
    device: torch.device,
) -> dict[str, Any]:
    """Return every setting that determines responses and verdicts, except the weights."""
    config = request.config
    sampling_device = device.type
    if config.cluster.enabled:
        sampling_device = "cuda" if config.cluster.gpus_per_rollout_worker else "cpu"
    own_tools = {setting: path for setting, path in config.own_functions.items() if setting.startswith("tools.")}
    return {
        "checkpoint": config.model,
        "samples": config.evaluation.rollouts_per_prompt,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        **_unless_empty(top_k=sampling.top_k, min_new_tokens=sampling.min_new_tokens),
        "max_new_tokens": sampling.max_new_tokens,
        "seed": config.seed,
        "stop": list(config.sampling.stop),
        "dtype": config.dtype,
        "device": sampling_device,
        **_unless_empty(
            engine=config.engine.model_dump(include={"kind", "dtype"}, exclude_defaults=True),
            tools=config.tools.model_dump(mode="json") if config.tools.enabled else None,
            tool_files=_function_sums(own_tools),
            prompts_per_task=config.cluster.prompts_per_task if config.cluster.enabled else None,
        ),
        "prompts_per_part": prompts_per_batch(config.evaluation.rollouts_per_prompt, sampling.max_new_tokens),
        "accept_truncated": config.rewards.stop_properly > 0,
        "verification": _verification_settings(config.verification, domains),
        "prompt": config.prompt.model_dump(include={"system_prompt", "chat", "chat_template_options"}),
        "sources": [source.name for source in sets],
        "data": {
            source.name: _source_settings(source, request.format_of(source), prompts_of[source.name]) for source in sets
        },
    }


def _verification_settings(settings: VerificationSettings, domains: Container[str]) -> dict[str, Any]:
    functions = {domain: name for domain, name in settings.functions.items() if domain in domains}
    return {
        **settings.model_dump(include={"timeout_s", "memory_mib"}),
        "functions": functions,
        **_unless_empty(function_files=_function_sums(functions)),
        **settings.model_dump(
            include={"sandbox", "batch_timeout_s", "completions", "thought_tags", "sees"}, exclude_defaults=True
        ),
    }


def _source_settings(source: SourceQuestions, style: PromptFormat, prompts: Sequence[Prompt]) -> dict[str, Any]:
    return {
        "source": source.source.model_dump(mode="json", exclude={"weight"}),
        "template": style.template,
        **_unless_empty(domain_templates=dict(style.domain_templates)),
        "prompts": len(prompts),
        "prompts_fingerprint": fingerprint(prompts),
    }


def _unless_empty(**values: Any) -> dict[str, Any]:
    """Return the values that are not None, 0 or empty."""
    return {name: value for name, value in values.items() if value}


def _function_sums(functions: Mapping[str, str]) -> dict[str, str]:
    """Return the sizes and checksums of the files with the user's functions, by domain or setting."""
    files = {name: function_file(path) for name, path in functions.items()}
    return {name: size_and_sum(file) for name, file in files.items() if file is not None}
