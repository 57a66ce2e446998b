"""Build the model, engine and learner of one process, for a run, a plan, or a learner rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from brorl.activity import Echo, Observe, Stage, unobserved
from brorl.config.settings import TrainConfig
from brorl.model.cuda_graphs import GraphChoice
from brorl.model.device import DTYPES
from brorl.model.flat_path import FlatForward
from brorl.model.flex_options import choose_flex_options
from brorl.model.forward import (
    Forward,
    choose_forward,
    with_packed_passes,
    with_recorded_passes,
    without_windows,
)
from brorl.model.load import choose_device, end_tokens, load_model
from brorl.model.logprobs import NextToken
from brorl.model.sharding import shard
from brorl.model.tree_path import TreeForward
from brorl.prompts.stream import PromptStream
from brorl.rollout.chosen_engine import OnEnd, build_engine
from brorl.rollout.engine import Engine
from brorl.tools.setup import with_turns
from brorl.training.inputs import ModelInputs, RunInputs
from brorl.training.learner import TreeLearner
from brorl.training.policy_logprobs import next_token
from brorl.training.ranks import ALONE, Ranks, load_on_first_rank
from brorl.verification.grade import Grader


@dataclass(frozen=True)
class LocalParts:
    """The parts of a run in one process. `brorl plan` measures them."""

    config: TrainConfig  # the recipe
    model: PreTrainedModel  # the model to train
    engine: Engine  # samples from the model or from a copy
    stream: PromptStream  # the training prompts
    grader: Grader  # verifies and rewards responses
    forward: Forward = field(default_factory=TreeForward)  # how trees go through the model in the learner
    stop_token_ids: tuple[int, ...] = ()  # the tokens that end a response
    observe: Observe = unobserved  # receives activities

    @classmethod
    def load(
        cls,
        config: TrainConfig,
        inputs: RunInputs,
        observe: Observe = unobserved,
        on_end: OnEnd = lambda _: None,
        echo: Echo = lambda _: None,
    ) -> LocalParts:
        """Load the model and build the parts. `on_end` receives a function that closes the engine."""
        tokenizer = inputs.tokenizer
        model = build_model(config, inputs, observe)
        forward = build_forward(config, inputs, model, echo)
        engine = build_engine(config, inputs.model_path, model, tokenizer, forward, inputs.context, observe, echo)
        engine = with_turns(engine, inputs.toolbox)
        on_end(engine.close)
        forward = build_learner_forward(config, model, forward, echo, records_passes=inputs.memory.recorded_bytes > 0)
        stop_token_ids = end_tokens(model, tokenizer, config.sampling.stop)
        return cls(config, model, engine, inputs.prompts.train, inputs.grader, forward, stop_token_ids, observe)

    @property
    def next_token(self) -> NextToken:
        """The distribution that rollouts are drawn from."""
        return next_token(self.config, self.stop_token_ids)

    def learner(self, model: PreTrainedModel | None = None, echo: Echo = lambda _: None) -> TreeLearner:
        """Build a learner for the model, or for the copy `model`, which gets recorded passes of its own."""
        model = self.model if model is None else model
        forward = self.forward
        if model is not self.model and isinstance(forward, TreeForward) and forward.graphs is not None:
            forward = replace(forward, graphs=forward.graphs.of(model))
        return TreeLearner(model, self.config, echo, self.observe, forward=forward, stop_token_ids=self.stop_token_ids)


def build_model(
    config: TrainConfig,
    inputs: ModelInputs,
    observe: Observe = unobserved,
    device: torch.device | None = None,
) -> PreTrainedModel:
    """Load the model to train."""
    observe(Stage("loading", "model"))
    return load_model(
        inputs.model_path,
        device or choose_device(config.device),
        torch.float32 if config.autocasts else DTYPES[config.dtype],
        config.adapters,
        gradient_checkpointing=config.engine.gradient_checkpointing,
    )


def build_forward(
    config: TrainConfig,
    inputs: ModelInputs,
    model: PreTrainedModel,
    echo: Echo = lambda _: None,
) -> TreeForward | FlatForward:
    """Choose how trees go through the model."""
    forward = choose_forward(model, config.engine.forward, inputs.context, config.engine.attention)
    _explain_flat_path(forward, echo)
    return forward


def _explain_flat_path(forward: Forward, echo: Echo) -> None:
    """If the flat path is used, tell the user why and what it costs."""
    if isinstance(forward, FlatForward):
        echo(
            f"using the flat path, because {forward.reason}; a pass has one row per distinct response, with its "
            "prompt, and recomputes shared tokens"
        )


def build_learner_forward(
    config: TrainConfig,
    model: PreTrainedModel,
    forward: Forward,
    echo: Echo,
    ranks: Ranks = ALONE,
    *,
    records_passes: bool = False,
) -> Forward:
    """Choose how trees go through the learner's model. On CUDA the learner has a faster path than the engine.

    `records_passes` sets whether passes may become CUDA graphs, which keep their memory.
    """
    engine = config.engine
    plain = without_windows(model, forward)
    # FlexAttention keeps log-sum-exps in float32
    unpacked = engine.attention == "tiled" or engine.forward == "flat" or config.dtype == "float64"
    if unpacked or model.device.type != "cuda":
        if plain is not forward:
            _explain_flat_path(plain, echo)
        return plain

    def failed_anywhere(failed: bool) -> bool:
        return bool(ranks.maximum(int(failed)))

    dtype = torch.bfloat16 if config.autocasts else model.dtype
    workload = dtype, engine.nodes_per_pass or plain.default_max_nodes(model), config.longest_response
    shapes = plain.kv_shapes if isinstance(plain, TreeForward) else ()
    options = ranks.call_on_first_rank(lambda: choose_flex_options(model, shapes, workload, echo))
    packed = with_packed_passes(
        model, plain, echo, autocast=config.autocasts, flex_options=options, failed_anywhere=failed_anywhere
    )
    choice: GraphChoice = engine.cuda_graphs if records_passes else "off"
    return with_recorded_passes(model, packed, echo, choice, autocast=config.autocasts)


def build_rank(
    config: TrainConfig,
    inputs: ModelInputs,
    ranks: Ranks,
    echo: Echo = lambda _: None,
    observe: Observe = unobserved,
) -> TreeLearner:
    """Load the model and build one rank of the learner. Every rank calls this. Rank 0 reads the weights."""

    def load(device: torch.device | None = None) -> tuple[PreTrainedModel, tuple[Forward, tuple[int, ...]]]:
        model = build_model(config, inputs, observe, device)
        stop_token_ids = end_tokens(model, inputs.tokenizer, config.sampling.stop)
        return model, (build_forward(config, inputs, model, echo), stop_token_ids)

    if ranks.size == 1:
        model, (forward, stop_token_ids) = load()
    else:
        model, weights, (forward, stop_token_ids) = load_on_first_rank(
            ranks, lambda: load(torch.device("cpu")), config.adapters, config.engine.gradient_checkpointing
        )
        if isinstance(forward, TreeForward):  # sharded weights are gathered only in the model's modules
            forward = replace(forward, llama_chunks=False)
        shard(model, weights, choose_device(config.device), config.autocasts)
    # the rank does not know how much memory others use
    records_passes = ranks.size == 1 and config.engine.cuda_graphs == "on"
    forward = build_learner_forward(config, model, forward, echo, ranks, records_passes=records_passes)
    return TreeLearner(model, config, echo, observe, ranks, forward=forward, stop_token_ids=stop_token_ids)
