"""`brorl init --from CONFIG`: a config of TRL's GRPOTrainer or of verl as a recipe, checked as far as needs no model.

The other trainer's defaults count too: what the config does not set is taken from there, where the default differs.
docs/how-to/from_trl_or_verl.md has the table, with the differences that remain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from brorl.api.recipe import check_cheaply
from brorl.config.conversion import Conversion
from brorl.config.from_trl import from_trl
from brorl.config.from_verl import from_verl
from brorl.config.reading import make_config, nested_settings, parse_yaml
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.prompts.files import read_source
from brorl.prompts.rows import is_local
from brorl.prompts.settings import FileSource
from brorl.storage import dotted
from brorl.wording import option

_OF_TRL = {
    "num_generations", "max_completion_length", "scale_rewards", "loss_type", "epsilon", "beta", "num_iterations",
    "steps_per_generation", "reward_funcs", "mask_truncated_completions",
}  # fmt: skip


def convert(config: Mapping[str, Any], source: str, num_prompts: int | None = None) -> Conversion:
    """Return the recipe of a config of TRL or verl.

    Args:
        config: The config, nested or by dotted name.
        source: Its name, for messages.
        num_prompts: Prompts of the training data, from which epochs become steps; None if it was not read.

    Raises:
        UserError: If it is of neither trainer, or a value has no counterpart.
    """
    given = dict(dotted(config))
    is_verl = any(name.startswith(("actor_rollout_ref.", "algorithm.")) for name in given)
    if not is_verl and not _OF_TRL & set(given):
        raise UserError(
            f"{source} is neither a config of TRL's GRPOTrainer (num_generations, ...) nor of verl "
            "(actor_rollout_ref, ...)"
        )
    try:
        return from_verl(given, num_prompts) if is_verl else from_trl(given, num_prompts)
    except (TypeError, ValueError) as error:
        raise UserError(f"{source} has a value of a wrong type: {error}; give the resolved value") from error


def read_conversion(file: Path, num_prompts: int | None = None) -> Conversion:
    """Convert a file; without `num_prompts`, with the number of prompts in the data that it names.

    Raises:
        UserError: If it cannot be read or converted.
    """
    try:
        config = parse_yaml(file.read_text("utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{option('from', file)}: {getattr(error, 'strerror', None) or error}; give a YAML config"
        ) from error
    if not isinstance(config, dict):
        raise UserError(f"{option('from', file)} is not a mapping of settings; give the YAML config of TRL or verl")
    found = convert(config, str(file), num_prompts)
    number = None if num_prompts else _num_prompts(found.settings.get("data.sources", []))
    return found if number is None else convert(config, str(file), number)


def with_data(conversion: Conversion, own: Mapping[str, Any]) -> Conversion:
    """Return a conversion with other data; `own` has the settings that this data decides, its functions among them."""
    of_its_data = ("verification.functions", "evaluation.sources", "data.held_out_fraction")
    settings = {name: value for name, value in conversion.settings.items() if name not in of_its_data}
    if weights := settings.get("rewards.domain_weights"):
        (weight,) = weights.values()
        settings["rewards.domain_weights"] = {source.get("domain"): weight for source in own["data.sources"]}
    return replace(conversion, settings={**settings, **own})


def converted_recipe(conversion: Conversion, name: str) -> str:
    """Return the recipe as YAML, with what has to be known at its top."""
    from ruamel.yaml import YAML

    stream = StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(nested_settings(conversion.settings, name), stream)
    lines = [f"# From a config of {conversion.trainer}. Check it: brorl check {name}. Train it: brorl train {name}"]
    lines += [f"# - {remark}" for remark in conversion.remarks]
    if conversion.without_counterpart:
        lines.append(f"# Without a counterpart, and left out: {', '.join(conversion.without_counterpart)}")
    return "\n".join([*lines, stream.getvalue()])


def conversion_summary(conversion: Conversion, output: Path) -> list[str]:
    """Return what was converted, what was not, what the checks say, and the next commands."""
    left = conversion.without_counterpart
    return [
        f"wrote {output}, from a config of {conversion.trainer}: {len(conversion.settings)} settings",
        *(f"  {remark}" for remark in conversion.remarks),
        *([f"  without a counterpart, and left out: {', '.join(left)}"] if left else []),
        _checked(make_config(parse_yaml(output.read_text("utf-8"), str(output)), {}, str(output))),
        f"check the recipe: brorl check {output}",
        f"train with it: brorl train {output}",
    ]


def _checked(config: TrainConfig) -> str:
    """Return what the checks say that need no model: settings, files, and the rows of the data on this machine."""
    from brorl.evaluation.questions import build_questions, check_split  # imports numpy

    sources = (*config.data.sources, *config.evaluation.sources)
    try:
        far = [one.path for one in sources if isinstance(one, FileSource) and not is_local(one.path)]
        check_cheaply(config)
        if not far:
            check_split(config, build_questions(config))
    except UserError as error:
        return f"  mend before training: {error}"
    rows = f"brorl check reads {', '.join(dict.fromkeys(far))}" if far else "every row of the data can be used"
    return f"  checked: the settings fit together; {rows}"


def _num_prompts(sources: list[dict[str, Any]]) -> int | None:
    """Return the number of distinct questions; None if a source is not on this machine or cannot be read."""
    try:
        files = [FileSource(**source) for source in sources]
        if not files or not all(is_local(file.path) for file in files):
            return None
        return sum(len(read_source(file).questions) for file in files)
    except (UserError, ValueError):  # the checks say it
        return None
