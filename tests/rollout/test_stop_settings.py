"""`sampling.stop` from the settings to the engine, the verifier, the learner and an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import brorl
from brorl.assemble import build_evaluation
from brorl.config.reading import make_config
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.evaluation.datasets import EvaluationRequest
from brorl.evaluation.preparation import prepare_evaluation
from brorl.model.load import end_tokens, load_tokenizer
from brorl.rollout.chosen_engine import build_engine
from brorl.rollout.engine import SampleTask
from brorl.training.inputs import prepare_run
from brorl.training.local_parts import build_forward, build_model
from brorl.training.policy_logprobs import next_token
from brorl.tree import RolloutTree
from run_support import save_tiny_model

TINY = {
    "data.sources": {"task": "countdown", "max_number": 5}, "evaluation.num_prompts": 2,
    "evaluation.rollouts_per_prompt": 8,
    "evaluation.ks": [1],
    "sampling.max_new_tokens": 8, "engine.threads": 1,
}  # fmt: skip
STOP = ["-", "3"]


def config(model: Path | str, **overrides: Any) -> TrainConfig:
    return make_config({}, {**TINY, "model": str(model), **overrides}, "test")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("endless"), end_token=False)


def assert_stopped(tree: RolloutTree, model: Path | str, decode: Any, minimum: int = 0) -> None:
    """A response ends with the first of its texts, which the verifier does not see, or it is cut."""
    tokenizer = load_tokenizer(str(model), STOP)
    for (tokens, _), finished in zip(tree.responses(), tree.finished, strict=True):
        texts = [tokenizer.decode(list(tokens[minimum:n]), skip_special_tokens=True) for n in range(len(tokens) + 1)]
        assert not any(stop in text for stop in STOP for text in texts[:-1])
        stops = [stop for stop in STOP if texts[-1].endswith(stop)]
        assert finished == bool(stops)
        full_text = tokenizer.decode(list(tokens), skip_special_tokens=True)
        assert decode(tokens) == (full_text[: -len(stops[0])] if stops else full_text)
    assert tree.finished.any()


def test_a_run_of_a_model_without_an_end_token(endless: Path) -> None:
    settings = config(endless, **{"sampling.stop": STOP, "sampling.min_new_tokens": 2})
    inputs = prepare_run(settings, str(endless))
    model = build_model(settings, inputs)
    assert end_tokens(model, inputs.tokenizer, STOP) == ()
    forward = build_forward(settings, inputs, model)
    next_token(settings, ())  # no stop token is forbidden in the first tokens
    engine = build_engine(settings, str(endless), model, inputs.tokenizer, forward, inputs.context)
    prompts = [prompt.token_ids for prompt in inputs.prompts.held_out]
    for tree in engine.sample(SampleTask(prompts, 64, settings.sampling.params, seed=1)):
        assert_stopped(tree, endless, inputs.grader.decode, minimum=2)


def test_an_evaluation_ends_its_responses_as_the_run_does(endless: Path) -> None:
    settings = config(endless, **{"sampling.stop": STOP})
    ready = prepare_evaluation(EvaluationRequest(settings, (), belongs_to_run=True, own_template=False))
    assert ready.settings["stop"] == STOP
    engine, evaluator, _ = build_evaluation(ready)
    (tree,) = engine.sample(SampleTask([ready.batches[0].prompts[0].token_ids], 64, ready.sampling, seed=1))
    assert_stopped(tree, endless, evaluator.grader.decode)


def test_the_tree_of_a_prompt_ends_its_responses(endless: Path) -> None:
    sampled = brorl.sample(str(endless), "1 2 3 -> 6:", rollouts=64, **{"sampling.stop": STOP})
    assert_stopped(sampled.tree, endless, sampled.decode)


@pytest.mark.parametrize(("text", "why"), [("", "is empty"), ("a\N{REPLACEMENT CHARACTER}", "is not readable text")])
def test_texts_that_no_tokenizer_has_are_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=f"a response cannot end with .*, which {why}; remove it from sampling.stop"):
        config("quickstart", **{"sampling.stop": ["\n", text]})
    assert config("quickstart", **{"sampling.stop": "\n"}).sampling.stop == ("\n",)
