"""Settings from Python mean what they mean on the command line and in a recipe."""

from pathlib import Path

import numpy as np
import pytest

from brorl.api.arguments import recipe_name, resolve_config
from brorl.config.reading import dump_yaml, flat_settings, make_config, read_recipe
from brorl.config.settings import TrainConfig
from brorl.errors import UserError


def test_name_path_mapping_and_config_give_the_same_config(tmp_path: Path) -> None:
    expected = make_config(read_recipe("quickstart-16"), {}, "quickstart-16")
    file = tmp_path / "mine.yaml"
    file.write_text(dump_yaml(expected))
    for given in ("quickstart-16", file, str(file), read_recipe("quickstart-16"), expected):
        assert resolve_config(given, {}) == expected


def test_nested_and_dotted_overrides_are_those_of_the_command_line(rng: np.random.Generator) -> None:
    steps, every, top_k = (int(number) for number in rng.integers(2, 1000, 3))
    expected = make_config(
        read_recipe("quickstart"), {"steps": steps, "evaluation.every": every, "sampling.top_k": top_k}, "quickstart"
    )
    nested = {"steps": steps, "evaluation": {"every": every}, "sampling.top_k": top_k}
    for given in ("quickstart", read_recipe("quickstart"), resolve_config("quickstart", {})):
        assert resolve_config(given, nested) == expected
    config = resolve_config({"model": "quickstart", "evaluation": {"rollouts_per_prompt": 8, "ks": [1]}}, nested)
    evaluation = config.evaluation
    assert (evaluation.every, evaluation.rollouts_per_prompt) == (every, 8)  # the other keys of a section stay


def test_settings_that_are_mappings_are_replaced_as_a_whole() -> None:
    given = {"rewards": {"domain_weights": {"math": 0.5}}, "verification.functions": {"a.b": "m:f"}}
    assert flat_settings(given) == {"rewards.domain_weights": {"math": 0.5}, "verification.functions": {"a.b": "m:f"}}
    assert resolve_config("prorl", given).rewards.domain_weights == {"math": 0.5}


def test_paths_and_tuples_are_taken(tmp_path: Path) -> None:
    config = resolve_config("quickstart", {"output_dir": tmp_path, "evaluation": {"ks": (1, 2)}})
    assert config.output_dir == str(tmp_path)
    assert config.evaluation.ks == (1, 2)


def test_what_is_no_recipe_is_refused_and_a_recipe_has_the_name_that_was_given() -> None:
    with pytest.raises(UserError, match="a mapping of settings or a TrainConfig, not int"):
        resolve_config(5, {})  # type: ignore[arg-type]
    names = [recipe_name(given) for given in ("small/prorl", Path("a/b.yaml"), {}, TrainConfig())]
    assert names == ["small/prorl", "a/b.yaml", "settings", "settings"]
