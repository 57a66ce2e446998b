"""Recipes are checked before any work: every message names the setting and the fix."""

import json
from pathlib import Path
from typing import Any

import pytest

from brorl.config.reading import (
    CHANGEABLE_ON_RESUME,
    SETTING_OF,
    dump_yaml,
    first_change,
    fixed_settings,
    make_config,
    parse_yaml,
    read_recipe,
    setting_fields,
    unknown_setting,
)
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from each_row import each_row

NAMES = [name for name, _ in setting_fields(TrainConfig)]


def test_every_setting_of_every_section_is_listed_and_described() -> None:
    written = dump_yaml(TrainConfig())
    tree = parse_yaml(written, "dump")

    def flat(settings: dict[str, Any], above: str = "") -> list[str]:
        """Names of all values; an empty mapping is a value, such as that of the domains' weights."""
        return [
            name
            for key, value in settings.items()
            for name in (flat(value, f"{above}{key}.") if isinstance(value, dict) and value else [f"{above}{key}"])
        ]

    assert sorted(NAMES) == sorted(flat(tree))
    assert {"model", "rollouts_per_prompt", "prompts_per_step", "steps", "checkpoint_every", "seed"} <= set(NAMES)
    assert {"output_dir", "device", "dtype"} <= set(NAMES)
    for name, info in setting_fields(TrainConfig):
        assert info.description, name


def test_dumped_config_reads_back_the_same() -> None:
    overrides = {"optimizer.learning_rate": 1e-6, "evaluation.ks": [1, 2], "output_dir": "yes"}
    config = make_config({}, overrides, "test")
    assert make_config(parse_yaml(dump_yaml(config), "dump"), {}, "dump") == config
    assert config.output_dir == "yes"


@each_row(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("3E-4", 3e-4),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("2", 2),
        ("null", None),
        ("true", True),
        ("no", "no"),
    ],
)
def test_values_are_yaml_1_2(text: str, value: Any) -> None:
    parsed = parse_yaml(f"a: {text}", "test")["a"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_whole_numbers_are_fine_where_fractions_are_wanted_but_not_the_other_way_round() -> None:
    assert make_config({}, {"optimizer.max_grad_norm": 2}, "test").optimizer.max_grad_norm == 2.0
    with pytest.raises(UserError, match=r"^steps: .*whole number.* 1000\.5 .*test"):
        make_config({"steps": 1000.5}, {}, "test")
    assert make_config({}, {"steps": 1e3}, "test").steps == 1000


@each_row(
    ("recipe", "overrides", "steps"),
    [
        ({}, {}, 100),
        ({"steps": 7}, {}, 7),
        ({"budget": {"limit": 5}}, {}, None),
        ({"steps": 7, "budget": {"limit": 5}}, {}, 7),
        ({"steps": None, "budget": {"limit": 5}}, {}, None),
        ({"steps": 7}, {"budget.limit": 5}, None),
        ({"steps": 7, "budget": {"limit": 3}}, {"budget.limit": 5}, None),
        ({"steps": 7}, {"budget.limit": 5, "steps": 9}, 9),
        ({"budget": {"limit": 5}}, {"steps": 9}, 9),
        ({"budget": {"limit": 5}}, {"budget.limit": None}, 100),
        ({"steps": 7, "budget": {"limit": 5}}, {"budget.limit": None}, 7),
    ],
)
def test_a_budget_lifts_the_number_of_steps_unless_both_are_given(
    recipe: dict[str, Any], overrides: dict[str, Any], steps: int | None
) -> None:
    config = make_config(recipe, overrides, "test")
    assert config.steps == steps
    assert make_config(parse_yaml(dump_yaml(config), "dump"), {}, "dump") == config  # as on resume


@each_row(
    ("name", "value"),
    [
        ("rollouts_per_prompt", 8),
        ("optimizer.learning_rate", 1e-4),
        ("data.sources", {"path": "a.jsonl", "weight": 2}),
        ("evaluation.ks", [1, 2]),
        ("rewards.cosine_length.on_steps", 3),
        ("verification.functions", {"mine": "rules:judge"}),
        ("cluster.prompts_per_task", 2),
        ("optimizer.states", "8bit"),
    ],
)
def test_settings_that_may_not_change_on_resume(name: str, value: Any) -> None:
    first = {"data.sources": {"path": "a.jsonl"}}
    before, after = (make_config({}, settings, "test") for settings in (first, first | {name: value}))
    for begun, now in ((before, after), (after, before)):
        before = json.loads(json.dumps(fixed_settings(begun)))  # as the run directory holds it
        assert first_change(before, now) == name


def test_settings_that_may_change_on_resume() -> None:
    first = {"data.sources": {"path": "a.jsonl"}, "budget.limit": 5}
    before = json.loads(json.dumps(fixed_settings(make_config({}, first, "test"))))
    assert {*CHANGEABLE_ON_RESUME} & {*before} == {"optimizer.states"}  # of which 8bit alone rounds
    others = {
        "steps": 7, "budget.limit": 9, "budget.eval_points": [3], "output_dir": "b", "device": "cuda", "report": False,
        "optimizer.states": "host", "reference.offload": True, "engine.attention": "tiled", "tracking.to": "wandb",
        "data.sources": {"path": "moved/a.jsonl"}, "verification.sandbox": "seccomp", "cluster.nodes": 2,
        "cluster.placement": "colocated", "cluster.gpus_per_rollout_worker": 1, "cluster.gpus_per_learner_rank": 1,
    }  # fmt: skip
    assert first_change(before, make_config({}, others, "test")) is None
    assert first_change({}, make_config({}, {"seed": 4}, "test")) is None  # begun by a version that kept none


@each_row(
    ("settings", "key", "meant"),
    [
        ({"stpes": 4}, "stpes", "mean steps?"),
        ({"rollout_per_prompt": 4}, "rollout_per_prompt", "mean rollouts_per_prompt?"),
        ({"models": "x"}, "models", "mean model?"),
        ({"los": {"clip_high": 0.2}}, "los", "mean loss?"),
        ({"loss": {"clip_hihg": 0.2}}, "loss.clip_hihg", "mean loss.clip_high?"),
        ({"optimizer": {"lerning_rate": 0.2}}, "optimizer.lerning_rate", "mean optimizer.learning_rate?"),
        ({"clip_high": 0.2}, "clip_high", "mean loss.clip_high?"),
        ({"learning_rate": 0.2}, "learning_rate", "mean optimizer.learning_rate?"),
        ({"xyzzy": 1}, "xyzzy", "brorl train --help"),
    ],
)
def test_unknown_key_names_the_nearest(settings: dict[str, Any], key: str, meant: str) -> None:
    with pytest.raises(UserError) as caught:
        make_config(settings, {}, "my.yaml")
    assert str(caught.value).startswith(f"{key} ")
    assert meant in str(caught.value)
    assert "my.yaml" in str(caught.value)


def test_names_of_other_trainers_stand_for_settings_that_exist() -> None:
    names = {"lr": "optimizer.learning_rate", "batch_size": "prompts_per_step", "optimizer.beta": "optimizer.betas"}
    for name, setting in (names | {"actor_rollout_ref.rollout.n": "rollouts_per_prompt"}).items():
        assert f"did you mean {setting}?" in unknown_setting(name)
    assert {*SETTING_OF.values()} <= {*NAMES}
    assert not {*SETTING_OF} & {name.rpartition(".")[2] for name in NAMES}


@each_row("name", [n for n in NAMES if len(n.rpartition(".")[2]) > 5])
def test_every_key_is_found_again_without_its_last_letter(name: str) -> None:
    assert f"did you mean {name}?" in unknown_setting(name[:-1])


WRONG: dict[str, list[Any]] = {
    "steps": [0, -3, 2.5, "many", True], "rollouts_per_prompt": [1], "prompts_per_step": [0], "checkpoint_every": [0],
    "keep_checkpoints": [-1], "store_rollouts_every": [-1], "seed": [-1, 10**30], "model": [5], "device": ["gpu",
    "cuda:x"],
    "dtype": ["float16"], "data.sources": [3, [], [{"task": "countdown"}, 4]], "data.held_out_fraction": [-0.1, 1.0],
    "data.max_prompt_tokens": [-1], "prompt.chat": ["sometimes"], "prompt.template": [None],
    "verification.timeout_s": [0], "verification.memory_mib": [10], "verification.functions": ["mine:check"],
    "rewards.stop_properly": [1.5], "rewards.cosine_length.every_steps": [-1], "rewards.overlong_tokens": [-1],
    "rewards.partial_credit": [0.5], "loss.kind": ["reinforce"], "loss.aggregation": ["median"],
    "importance.correction": ["clip"], "importance.low": [1.0], "importance.high": [0.5], "kl.coefficient": [-0.1],
    "kl.estimator": ["k4"], "kl.placement": ["both"], "kl.clamp": [0, 51], "reference.reset_every": [-1],
    "reference.reset_kl_above": [0], "reference.reset_patience": [0], "lora.rank": [-1], "lora.target_modules": [[]],
    "collapse.patience": [0], "collapse.entropy_fraction": [1], "tracking.to": ["tensorbord"],
    "sampling.temperature": [0, -1.0, 1e-39, float("nan"), float("inf")], "sampling.top_p": [0, 1.5],
    "sampling.top_k": [-1],
    "sampling.max_new_tokens": [0], "advantage.estimator": ["ppo"], "advantage.normalize_over": ["words"],
    "dynamic_sampling.enabled": ["yes"], "dynamic_sampling.max_tries": [0],
    "dynamic_sampling.max_pass_rate": [0, 1.1], "loss.clip_low": [0, 1.1],
    "loss.clip_high": [-0.1], "optimizer.learning_rate": [0, "1e-6", float("inf")], "optimizer.mini_batches": [0],
    "optimizer.betas": [0.9, [0.9], [0.9, 0.95, 0.99], [0.9, 2.0]], "optimizer.weight_decay": [-0.1],
    "optimizer.max_grad_norm": [0], "optimizer.warmup_updates": [-1], "optimizer.reference_batch": [0],
    "optimizer.old_logprobs": ["guess"], "evaluation.every": [-1], "budget.limit": [0],
    "evaluation.num_prompts": [-1], "evaluation.rollouts_per_prompt": [0],
    "evaluation.ks": [5, [], [0, 1], [1, 1000], [1.5]], "evaluation.temperature": [-1],
    "engine.memory_gib": [0, float("inf")],
    "engine.nodes_per_pass": [1], "engine.threads": [-1], "loss": [3],
}  # fmt: skip


def test_repeated_and_unsorted_ks_are_put_in_order() -> None:
    """The engine of an evaluation takes them as they are, and a run compares them with those that it stored."""
    config = make_config(read_recipe("quickstart"), {"evaluation.ks": [16, 1, 1, 16, 4]}, "quickstart")
    assert config.evaluation.ks == (1, 4, 16)


@each_row(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_value_is_one_line_with_name_and_value(name: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        make_config({name: value}, {}, "my.yaml")
    message = str(caught.value)
    assert message.startswith(name)
    assert "\n" not in message
    assert message.endswith("(in my.yaml)")
    with pytest.raises(UserError) as caught:
        make_config({}, {name: value}, "my.yaml")
    assert str(caught.value).startswith(name)
    assert "my.yaml" not in str(caught.value)
    if value != []:
        shown = str(tuple(value)) if name == "evaluation.ks" and isinstance(value, list) else repr(value)
        assert shown in message or repr(value) in message or str(value[-1]) in message


BFLOAT16 = {"engine.dtype": "bfloat16"}


ON_A_CLUSTER, ON_CUDA, TOOLS = {"cluster.nodes": 1}, {"device": "cuda"}, {"tools.calculator": True}


@each_row(
    ("settings", "parts"),
    [
        (ON_A_CLUSTER | {"engine.clock": "cpu", "engine.threads": 1}, ["engine.clock: wall"]),
        (ON_CUDA | {"engine.clock": "cpu", "engine.threads": 1}, ["engine.threads: 1", "device: cpu"]),
        (ON_CUDA | BFLOAT16 | {"importance.correction": "truncate"}, ["dtype: float32", "device: cpu"]),
        (ON_A_CLUSTER | {"device": "cpu", "cluster.gpus_per_learner_rank": 1}, ["device: auto"]),
        (ON_A_CLUSTER | {"device": "cuda"}, ["cluster.gpus_per_rollout_worker: 1"]),
        (
            ON_A_CLUSTER | {"cluster.placement": "colocated", "cluster.gpus_per_rollout_worker": 2},
            ["cluster.gpus_per_rollout_worker"],
        ),
        (
            {"prompts_per_step": 4, "optimizer.mini_batches": 5},
            ["optimizer.mini_batches = 5", "prompts_per_step = 4", "optimizer.mini_batches: 4"],
        ),
        (
            {"data.sources": {"task": "countdown", "min_target": 9, "max_target": 8}},
            ["data.sources", "min_target = 9", "max_target = 8"],
        ),
        (BFLOAT16, ["importance.correction = none", "importance.correction: truncate"]),
        (BFLOAT16 | {"dtype": "float64"}, ["dtype = float64", "engine.dtype: auto"]),
        (
            {"optimizer.states": "8bit", "dtype": "float64"},
            ["optimizer.states = 8bit", "dtype = float64", "dtype: float32", "optimizer.states: device"],
        ),
        (BFLOAT16 | {"device": "cuda"}, ["device = cuda", "engine.dtype: auto"]),
        (
            BFLOAT16 | {"engine.kind": "vllm"},
            ["engine.dtype = bfloat16", "engine.kind = vllm"],
        ),
        ({"importance.correction": "mask"}, ["importance.correction = mask", "optimizer.old_logprobs", "recompute"]),
        ({"reference.reset_every": 7}, ["reference.reset_every = 7", "kl.coefficient"]),
        ({"reference.reset_patience": 2}, ["reference.reset_patience = 2", "kl.coefficient"]),
        ({"reference.reset_optimizer": True}, ["reference.reset_optimizer", "reference.reset_every"]),
        ({"evaluation.num_prompts": 0, "evaluation.sources": "a.jsonl"}, ["evaluation.sources", "num_prompts = 0"]),
        (
            {"kl.coefficient": 0.1, "reference.reset_patience": 2, "evaluation.num_prompts": 0},
            ["reference.reset_patience", "evaluation.num_prompts = 0"],
        ),
        (
            {"advantage.estimator": "grpo", "advantage.normalize_over": "tokens"},
            ["advantage.normalize_over = tokens", "advantage.estimator = grpo"],
        ),
        ({"engine.clock": "cpu"}, ["engine.clock = cpu", "engine.threads: 1"]),
        ({"engine.clock": "cpu", "engine.threads": 1, "device": "cuda"}, ["engine.clock = cpu", "device: cpu"]),
        ({"loss.kind": "gspo", "loss.clip_low": 0.2}, ["loss.kind = gspo", "loss.clip_low = 0.2", "3e-4"]),
        ({"loss.kind": "gspo", "loss.clip_high": 0.28}, ["loss.kind = gspo", "loss.clip_high = 0.28", "4e-4"]),
        ({"rewards.format_pattern": "(a"}, ["rewards.format_pattern = '(a'"]),
        (
            {"sampling.min_new_tokens": 8, "sampling.max_new_tokens": 8},
            ["sampling.min_new_tokens = 8", "sampling.max_new_tokens = 8"],
        ),
        (
            {"rewards.overlong_tokens": 9, "sampling.max_new_tokens": 8},
            ["rewards.overlong_tokens = 9", "sampling.max_new_tokens = 8"],
        ),
        (
            {"rewards.cosine_length.every_steps": 5, "rewards.cosine_length.on_steps": 6},
            ["rewards.cosine_length.on_steps = 6", "rewards.cosine_length.every_steps = 5"],
        ),
        ({"steps": None}, ["steps = null", "budget.limit"]),
        (
            {"dynamic_sampling.max_pass_rate": 0.5, "dynamic_sampling.enabled": False},
            ["dynamic_sampling.max_pass_rate = 0.5", "dynamic_sampling.enabled"],
        ),
        (
            {"dynamic_sampling.max_pass_rate": 0.05, "rollouts_per_prompt": 16},
            ["dynamic_sampling.max_pass_rate = 0.05", "rollouts_per_prompt = 16"],
        ),
        ({"tools.format": "hermez"}, ["tools.format = hermez", "hermes", "my_format.py"]),
        (TOOLS | {"prompt.chat": "never"}, ["tools.format = auto", "prompt.chat: auto"]),
        (TOOLS | {"sampling.min_new_tokens": 2}, ["sampling.min_new_tokens = 2"]),
        (TOOLS | {"evaluation.min_new_tokens": 3}, ["evaluation.min_new_tokens = 3"]),
        (
            TOOLS | {"tools.max_response_tokens": 64, "sampling.max_new_tokens": 64},
            ["tools.max_response_tokens = 64", "sampling.max_new_tokens = 64"],
        ),
        (
            TOOLS | {"tools.max_response_tokens": 64, "sampling.max_new_tokens": 8, "evaluation.max_new_tokens": 63},
            ["tools.max_response_tokens = 64", "evaluation.max_new_tokens = 63"],
        ),
        (
            {"evaluation.ks": [1, 9], "evaluation.rollouts_per_prompt": 8},
            ["evaluation.ks", "evaluation.rollouts_per_prompt = 8", "9"],
        ),
    ],
)
def test_values_that_do_not_fit_together(settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        make_config({}, settings, "my.yaml")
    assert all(part in str(caught.value) for part in parts)
    assert "\n" not in str(caught.value)


def test_a_format_of_the_user_needs_no_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path is absolute, so that a run can be resumed from any folder."""
    monkeypatch.chdir(tmp_path)
    config = make_config({}, TOOLS | {"prompt.chat": "never", "tools.format": "mine.py"}, "x")
    assert config.tools.format == str(tmp_path / "mine.py")
    without_tools = make_config({}, {"prompt.chat": "never", "sampling.min_new_tokens": 2}, "x")
    assert not without_tools.tools.enabled


ASYNC = {
    "cluster.nodes": 1, "cluster.mode": "async", "importance.correction": "truncate",
    "optimizer.old_logprobs": "recompute",
}  # fmt: skip


@each_row(
    ("changes", "problem"),
    [
        ({"importance.correction": "none"}, "importance.correction: truncate"),
        ({"optimizer.old_logprobs": "engine"}, "optimizer.old_logprobs: recompute"),
        ({"cluster.nodes": 0}, "async.*cluster.nodes"),
        ({"cluster.placement": "colocated"}, "cluster.placement: apart.*cluster.mode: sync"),
    ],
)
def test_settings_that_do_not_fit_asynchronous_training(changes: dict[str, Any], problem: str) -> None:
    make_config({}, ASYNC, "x")
    with pytest.raises(UserError, match=problem):
        make_config({}, ASYNC | changes, "x")


@each_row(
    ("content", "said"),
    [
        (b"steps: 3\nloss: {clip_high: 0.2\nseed: 1\n", "line 3, column "),
        (b"steps: 3\n\tseed: 1\n", "line 2, column "),
        (b"steps: 3\nsteps: 4\n", "line 2, column "),
        (b"a: &x 1\nb: *y\n", "line 2, column "),
        *((text, "has no settings") for text in (b"", b"# nothing\n", b"- steps\n", b"5\n")),
        (b"\xff\xfe\x00steps", "is not readable UTF-8 text"),
        (b"steps: \x01 4\n", "is not YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_named(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        read_recipe(str(file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_recipe_names_the_nearest_and_the_built_in_ones(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"'quickstrat' .*quickstart.*did you mean quickstart\?",
    ):
        read_recipe("quickstrat")
    with pytest.raises(UserError, match="neither a file nor a built-in recipe"):
        read_recipe(str(tmp_path / "none.yaml"))
    with pytest.raises(UserError, match="neither a file nor a built-in recipe"):
        read_recipe(str(tmp_path))


@each_row(
    ("source", "parts"),
    [
        ({"path": "a.jsonl", "promt_column": "q"}, ["data.sources[0].promt_column ", "mean prompt_column?"]),
        ({"pth": "a.jsonl"}, ["data.sources[0].pth ", "mean path?"]),
        ({"name": "mine"}, ["data.sources[0].path: ", "missing"]),
        ({"task": "chess"}, ["data.sources[0].task: ", "'countdown'", "'chess'"]),
        ({"task": "countdown", "max_number": 1}, ["data.sources[0].max_number: ", " 2,", " 1 "]),
        ({"path": "a.jsonl", "weight": 0}, ["data.sources[0].weight: ", "greater than 0", " 0 "]),
        ({"task": "countdown", "path": "x"}, ["data.sources[0].path ", "task, name, num_numbers"]),
    ],
)
def test_what_is_wrong_with_a_source_is_named(source: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        make_config({"data": {"sources": [source]}}, {}, "my.yaml")
    assert str(caught.value).startswith(parts[0])
    assert all(part in str(caught.value) for part in parts)
    assert "\n" not in str(caught.value)


def test_one_source_is_a_list_of_one_and_text_is_a_path_or_a_puzzle() -> None:
    for given in ("a.jsonl", ["a.jsonl"], {"path": "a.jsonl"}, [{"path": "a.jsonl"}]):
        config = make_config({}, {"data.sources": given, "evaluation.sources": given}, "my.yaml")
        assert [s.path for s in (*config.data.sources, *config.evaluation.sources)] == ["a.jsonl", "a.jsonl"]
    assert make_config({}, {"data.sources": "countdown"}, "my.yaml").data == TrainConfig().data


def test_a_local_file_is_kept_by_its_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    given = {"data.sources": ["a.jsonl", "*.jsonl", "some/hub-id"]}
    paths = [s.path for s in make_config({}, given, "my.yaml").data.sources]
    assert paths == [str(tmp_path / "a.jsonl"), str(tmp_path / "*.jsonl"), "some/hub-id"]


def test_settings_in_sections_within_sections() -> None:
    config = make_config({"rewards": {"cosine_length": {"on_steps": 3}}}, {"rewards.cosine_length.every_steps": 9}, "x")
    assert (config.rewards.cosine_length.on_steps, config.rewards.cosine_length.every_steps) == (3, 9)
    with pytest.raises(UserError, match=r"rewards\.cosine_length in x must be a group of settings"):
        make_config({"rewards": {"cosine_length": 5}}, {"rewards.cosine_length.every_steps": 9}, "x")


def test_local_models_and_verifiers_are_kept_by_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link such as `best` is followed: it moves."""
    (tmp_path / "step-1").mkdir()
    (tmp_path / "best").symlink_to("step-1")
    (tmp_path / "rules.py").write_text("")
    monkeypatch.chdir(tmp_path)
    functions = {"a": "rules.py:judge", "b": "rules:judge"}
    config = make_config({}, {"model": "best", "verification.functions": functions}, "my.yaml")
    assert config.model == str(tmp_path / "step-1")
    assert config.verification.functions == {"a": f"{tmp_path}/rules.py:judge", "b": "rules:judge"}
    assert make_config({}, {"model": "some/hub-id"}, "my.yaml").model == "some/hub-id"
