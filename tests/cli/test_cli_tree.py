"""`brorl tree` and `brorl.sample`: the tree of one prompt, with verdicts, and beside that of another model."""

import io
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import brorl
from brorl import RolloutTree
from brorl.api.sample import SampledTree
from brorl.reporting.tool_use import tool_use_line
from brorl.runs.step_record import ToolUse
from run_support import command, refused, save_tiny_model
from small_models import mostly_slow

PUZZLE = "make 22 from 3 5 7"

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def is_right(text: str) -> bool:
    """Whether an expression has the three numbers once each and the value 22."""
    if sorted(re.findall(r"\d+", text)) != ["3", "5", "7"] or re.search(r"[^\d+\-*/() ]", text):
        return False
    try:
        return abs(eval(text) - 22) < 1e-9
    except (SyntaxError, ZeroDivisionError, TypeError):
        return False


def test_the_tree_of_a_prompt_is_drawn_with_its_verdicts() -> None:
    outcome = command("tree", "quickstart", PUZZLE, "--rollouts=128", "--lines=12")
    assert outcome.code == 0, outcome.err
    sampled = brorl.sample("quickstart", "make 22 from 7, 3, 5", rollouts=128)
    assert sampled.verdicts is not None
    responses = [(sampled.decode(tokens), count) for tokens, count in sampled.tree.responses()]
    right = sum(count for text, count in responses if is_right(text))
    assert sum(count for _, count in responses) == 128
    assert [verdict.correct for verdict in sampled.verdicts[0]] == [is_right(text) for text, _ in responses]
    first = re.search(r"3 5 7 -> 22: +(\d+) +1 +(\d+)%", outcome.out)
    assert first
    assert (int(first[1]), int(first[2])) == (128, round(100 * right / 128))
    assert f"quickstart: 128 rollouts, {len(responses)} distinct" in outcome.out


def test_results_have_a_mark_and_a_color() -> None:
    tree = RolloutTree.from_responses(
        (1,), [(2, 3, 4), (2, 3, 5), (2, 6)], given=[[False, True, False]] * 2 + [[False] * 2]
    )
    use = ToolUse(turns=5 / 3, calls=2, distinct_calls=1, given_tokens=1, failures={})
    sampled = SampledTree("a", ("m",), (tree,), None, str, 9, lambda tokens: f"so {list(tokens)}", (use,))
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    console.print(sampled)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    (result,) = (line for line in lines if "result: so [3]" in line)
    assert [line for line in lines if "\x1b[36m" in line] == [result]
    assert re.sub(r"\x1b\[\d+m", "", result).split() == ["├", "result:", "so", "[3]", "2"]  # no probability
    assert any(line.endswith(f"m: {tool_use_line(use)}") for line in lines)


@pytest.mark.slow
def test_a_run_is_drawn_beside_its_start(short_run: Path) -> None:
    drawn = brorl.sample(short_run, PUZZLE, rollouts=32, against="start")
    alone = brorl.sample("quickstart", PUZZLE, rollouts=32, **{"sampling.max_new_tokens": 16})
    assert drawn.names == ("before", "after")
    assert drawn.trees[0] == alone.tree
    assert drawn.trees[1] != drawn.trees[0]
    assert drawn.outline.count_K == [32, 32]


GROUPED = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
OF_THE_FLAT_PATH = {
    "gemma3_text": {"sliding_window": 16},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 16},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8},
}


@pytest.mark.parametrize("model_type", mostly_slow(OF_THE_FLAT_PATH))
def test_models_of_the_flat_path_are_sampled_as_in_training(model_type: str, tmp_path: Path) -> None:
    """Attention sinks, layers without attention, a window below the context: log-probs are those of a plain pass."""
    folder = save_tiny_model(tmp_path)
    loaded = AutoTokenizer.from_pretrained(folder)
    config = AutoConfig.for_model(model_type, vocab_size=len(loaded), **GROUPED, **OF_THE_FLAT_PATH[model_type])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.dim() == 1), 0.25)
    model.save_pretrained(folder)
    sampled = brorl.sample(folder, "1+2*(3-4)", rollouts=8, dtype="float32", **{"sampling.max_new_tokens": 24})
    prompt = sampled.tree.prompt_ids
    assert max(map(len, (tokens for tokens, _ in sampled.tree.responses()))) + len(prompt) > 16
    for leaf, (tokens, _) in zip(sampled.tree.leaf.tolist(), sampled.tree.responses(), strict=True):
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        got = sampled.tree.logprob[sampled.tree.path(leaf)]
        np.testing.assert_allclose(got, expected.detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_prompt_of_the_data_has_its_reference_and_another_one_has_none() -> None:
    known = brorl.sample("quickstart", "1 2 3 -> 6:", rollouts=8)
    assert known.verdicts is not None
    outcome = command("tree", "quickstart", "what is this?", "--rollouts=4")
    assert outcome.code == 0, outcome.err
    assert "no verdicts: the prompt is not in the data; give its reference answer with `reference`" in outcome.said
    judged = brorl.sample("quickstart", "3 5 7 -> 22:", rollouts=8, reference="3 5 7 -> 22", domain="countdown")
    assert judged.verdicts is not None


def test_the_settings_of_a_run_for_other_domains_or_its_engine_are_no_mistake(short_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(short_run, run)
    config = run / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    settings["rewards"]["domain_weights"] = {"math": 2.0}
    settings["engine"]["dtype"] = "bfloat16"
    config.write_text(yaml.safe_dump(settings))
    assert brorl.sample(run, PUZZLE, rollouts=4, dtype="bfloat16").verdicts is not None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("quickstart", PUZZLE, "--rollouts=0"), "`rollouts`: expected a number from 1 to"),
        (("quickstart", PUZZLE, "--lines=0"), "`lines`: expected at least 1"),
        (("quickstart", " "), "the prompt is empty"),
        (("quickstart", "some text", "--reference=5"), "`reference` needs the domain of its verifier"),
        (("quickstart", PUZZLE, "--against=start"), "`against=start`: only a run has a start"),
        (("missing/model", PUZZLE), "missing/model"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[str, ...], said: str) -> None:
    assert said in refused("tree", *arguments)
