"""The recipes that ship: every value marked, the paper's numbers, and a page that says the same."""

import re
import shlex
from math import sqrt
from pathlib import Path

import pytest

import brorl
from brorl.algorithms.settings import AdvantageSettings
from brorl.config.reading import builtin_recipes, make_config, parse_yaml, read_recipe
from brorl.config.settings import TrainConfig
from brorl.prompts.public_data import LAYOUTS
from brorl.prompts.rendering import TEMPLATES
from brorl.prompts.settings import FileSource, GymSource
from brorl.verification.domains.verifiers import DOMAINS
from brorl.verification.gym.task import OUT_OF_DISTRIBUTION, SETS

ROOT = Path(__file__).parents[1]
FOLDER = Path(brorl.__file__).parent / "recipes"
PUBLISHED = ("prorl-v1", "prorl", "prorl-v2.1", "brorl", "justrl")
MARK = re.compile(r"\((P|V2|V1|C|J|I|S|O)\)")


def config(name: str) -> TrainConfig:
    return make_config(read_recipe(name), {}, name)


def settings_of(name: str) -> dict[str, tuple[str, str]]:
    """Read (value, comment) of every setting of a recipe, by its dotted name, line by line; sources have numbers."""
    found: dict[str, tuple[str, str]] = {}
    above: list[tuple[int, str]] = []
    source = 0
    for line in (FOLDER / f"{name}.yaml").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        setting, _, comment = line.partition("  #")
        match = re.match(r"( *)(- )?([a-z_]+):(.*)", setting)
        assert match, line
        indent = len(match[1]) + len(match[2] or "")
        above = [entry for entry in above if entry[0] < indent]
        source = source + bool(match[2]) if above and above[-1][1] == "sources" else 0
        if value := match[4].strip():
            names = [f"sources[{source}]" if n == "sources" else n for _, n in above]
            found[".".join([*names, match[3]])] = (value, comment.strip())
        else:
            above.append((indent, match[3]))
    return found


@pytest.mark.parametrize("name", [*PUBLISHED, "small/prorl", "small/brorl"])
def test_every_value_carries_its_mark_and_every_mark_is_explained(name: str) -> None:
    settings = settings_of(name)
    assert len(settings) > 40
    assert [key for key, (_, comment) in settings.items() if not MARK.search(comment)] == []
    head, _, _ = (FOLDER / f"{name}.yaml").read_text().partition("\nmodel:")
    assert {mark for _, comment in settings.values() for mark in MARK.findall(comment)} <= {*MARK.findall(head)}


def differing(first: str, second: str) -> set[str]:
    """Return the sections in which two recipes differ, but for what is stored."""
    one, other = (config(name).model_dump() for name in (first, second))
    return {name for name in one if one[name] != other[name]} - {"checkpoint_every", "store_rollouts_every"}


@pytest.mark.parametrize(("first", "second"), [("prorl", "brorl"), ("small/prorl", "small/brorl")])
def test_the_second_stage_differs_only_where_the_paper_says(first: str, second: str) -> None:
    said = {"model", "rollouts_per_prompt", "prompts_per_step", "steps", "evaluation"}
    assert differing(first, second) <= said | ({"sampling", "importance"} if first == "prorl" else set())
    one, other = (config(name).model_dump() for name in (first, second))
    assert {k for k in one["evaluation"] if one["evaluation"][k] != other["evaluation"][k]} <= {"every"}
    assert {k for k in one["sampling"] if one["sampling"][k] != other["sampling"][k]} <= {"max_new_tokens"}
    rates = [config(n).scaled_learning_rate for n in (first, second)]
    assert rates[1] == pytest.approx(sqrt(8) * rates[0])
    assert config(second).samples_per_step == 8 * config(first).samples_per_step
    assert config(first).prompts_per_step == 4 * config(second).prompts_per_step


def test_the_clusters_of_the_page_add_up_to_its_gpus() -> None:
    page = (ROOT / "docs" / "how-to" / "cluster.md").read_text("utf-8")
    text = page.split("## Settings for 1, 8 and 64 GPUs")[1].replace("\\\n", " ")
    for gpus, command in zip((1, 8, 64), re.findall(r"^brorl train brorl (.*)$", text, re.MULTILINE), strict=True):
        names, values = (shlex.split(command)[start::2] for start in (0, 1))
        settings = {name[2:]: parse_yaml(value, name) for name, value in zip(names, values, strict=True)}
        cluster = make_config(read_recipe("brorl"), settings, "brorl").cluster
        sampling = cluster.rollout_workers * cluster.gpus_per_rollout_worker
        learning = cluster.learner_ranks * cluster.gpus_per_learner_rank
        assert gpus == (max(sampling, learning) if cluster.placement == "colocated" else sampling + learning)
        assert cluster.nodes == max(1, gpus // 8)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_recipes_deal_equal_mini_batches(name: str) -> None:
    recipe = config(name)
    assert recipe.prompts_per_step % recipe.optimizer.mini_batches == 0


def test_the_papers_numbers() -> None:
    first, second = config("prorl"), config("brorl")
    assert (first.rollouts_per_prompt, first.prompts_per_step, first.samples_per_step) == (16, 512, 8192)
    assert (second.rollouts_per_prompt, second.prompts_per_step, second.samples_per_step) == (512, 128, 65536)
    assert (second.evaluation.temperature, second.evaluation.top_p, second.evaluation.rollouts_per_prompt) == (
        0.6,
        0.95,
        16,
    )
    assert (first.sampling.max_new_tokens, second.sampling.max_new_tokens) == (8192, 16384 - 1024)
    corrections = []
    for stage in (first, second, config("small/prorl"), config("small/brorl")):
        assert (stage.phases, stage.advantage) == ((), AdvantageSettings(estimator="reinforce_pp_baseline"))
    for stage in (first, second):
        assert stage.data.max_prompt_tokens + (stage.evaluation.max_new_tokens or 0) == 32768
        assert (stage.loss.kind, stage.loss.clip_low, stage.loss.clip_high) == ("ppo", 0.2, 0.27)
        assert (stage.optimizer.learning_rate, stage.optimizer.mini_batches) == (1e-6, 8)
        assert (stage.kl.coefficient, stage.kl.estimator, stage.kl.placement) == (1e-4, "k2", "loss")
        corrections.append((stage.importance.correction, stage.importance.low, stage.importance.high))
        assert stage.recompute_old_logprobs
        shaping = stage.rewards
        assert shaping.stop_properly == 0
        applied = [shaping.cosine_length.in_force(step) for step in range(1, 1201)]
        assert applied == 2 * (100 * [True] + 500 * [False])
    assert [kind for kind, *_ in corrections] == ["mask", "truncate"]
    assert corrections[0][1:] == (0.5, 5.0)


def test_the_numbers_of_the_versions_before_and_after() -> None:
    before, after = config("prorl-v1"), config("prorl-v2.1")
    assert (before.rollouts_per_prompt, before.prompts_per_step, before.steps) == (16, 256, 2000)
    assert (before.advantage.estimator, before.loss.clip, before.sampling.temperature) == ("grpo", (0.2, 0.4), 1.2)
    assert (before.optimizer.scaled_rate(before.samples_per_step), before.optimizer.mini_batches) == (2e-6, 4)
    assert before.reference.reset_optimizer
    assert before.reference.first_reset == "reset_patience"
    assert differing("prorl", "prorl-v2.1") == {"advantage", "dynamic_sampling", "importance", "kl", "optimizer"}
    assert (after.optimizer.mini_batches, after.optimizer.old_logprobs) == (1, "recompute")  # a ratio of 1
    assert not after.dynamic_sampling.enabled
    mask = after.importance
    assert (mask.correction, mask.low, mask.high) == ("sequence_mask", 0.999, 1.002)
    assert after.kl.clamp == pytest.approx(sqrt(20), abs=1e-4)
    assert after.advantage.normalize_over == "tokens"


def test_the_simple_baseline_has_no_tricks() -> None:
    simple = config("justrl")
    assert (simple.rollouts_per_prompt, simple.prompts_per_step, simple.steps) == (8, 256, 4380)
    assert (simple.advantage.estimator, simple.loss.clip, simple.loss.dual_clip) == ("grpo", (0.2, 0.28), 10)
    steps = simple.optimizer
    assert (steps.learning_rate, steps.reference_batch, steps.schedule) == (1e-6, None, "constant")
    assert (steps.mini_batches, steps.warmup_updates, steps.weight_decay) == (4, 40, 0.1)
    assert (simple.dynamic_sampling.enabled, simple.kl.coefficient, simple.importance.correction) == (False, 0, "none")
    assert simple.reference.first_reset is None
    assert (simple.rewards.cosine_length.every_steps, simple.rewards.overlong_tokens) == (0, 0)
    measured = simple.evaluation
    assert (measured.temperature, measured.top_p, measured.max_new_tokens) == (0.7, 0.9, 31744)


@pytest.mark.parametrize("name", ["prorl-v1", "prorl", "prorl-v2.1", "brorl"])
def test_the_five_domains_have_layouts_templates_weights_and_verifiers(name: str) -> None:
    recipe = config(name)
    weights = {source.label: source.weight for source in recipe.data.sources}
    assert weights == {"math": 40, "code": 24, "science": 25, "ifeval": 10, "gym": 37}
    assert sum(weights.values()) == 136  # thousand prompts of ProRL v1
    assert {*recipe.rewards.domain_weights} == {*weights} == {*TEMPLATES}
    assert {*weights} <= {*DOMAINS}
    for source in recipe.data.sources:
        if isinstance(source, FileSource):
            assert source.layout is not None
            assert source.path in LAYOUTS[source.layout].datasets
        else:
            assert isinstance(source, GymSource)
            assert source.gym == ("prorl",)
            assert len(SETS["prorl"]) == 96
            assert {*SETS["prorl"]}.isdisjoint(OUT_OF_DISTRIBUTION)
    style = recipe.prompt
    for domain, template in TEMPLATES.items():
        wanted = ("\\boxed{}" in template, "<answer>" in template)
        assert ("\\boxed{}" in style.fill("", domain), "<answer>" in style.fill("", domain)) == wanted


def lines_of_the_page(cells: int) -> list[list[str]]:
    """Return the rows of the tables of `docs/reference/recipe.md` that have this number of cells."""
    page = (ROOT / "docs" / "reference" / "recipe.md").read_text()
    rows = [re.split(r" ?\| ?", line.strip("|").strip()) for line in page.splitlines() if line.startswith("| ")]
    return [row for row in rows if len(row) == cells]


def test_the_page_has_every_value_of_the_published_recipes_with_its_marks() -> None:
    """A row for every setting with a source, in order; *same* is the cell to the left, and a dash a default."""
    (head, *rows) = lines_of_the_page(1 + len(PUBLISHED))
    assert head == ["setting", *(f"`{name}`" for name in PUBLISHED)]
    recipes = [settings_of(name) for name in PUBLISHED]
    for key, *cells in rows:
        found = [recipe.get(key.strip("`")) for recipe in recipes]
        wanted = ["-" if one is None else f"`{one[0]}` {', '.join(MARK.findall(one[1]))}" for one in found]
        shown = [wanted[place - 1] if cell == "same" else cell for place, cell in enumerate(cells)]
        assert shown == wanted, key
    named = [row[0].strip("`") for row in rows]
    assert len({*named}) == len(named)
    for recipe in recipes:
        sourced = {key for key, (_, comment) in recipe.items() if {*MARK.findall(comment)} != {"O"}}
        assert {key for key in sourced if not key.startswith("prompt.")} <= {*named}
        assert [key for key in recipe if key in named] == [key for key in named if key in recipe]


def test_the_page_names_code_that_exists() -> None:
    files = [file for row in lines_of_the_page(4) for file in re.findall(r"`([^`]+/[^`]*)`", row[3])]
    assert len(files) > 9
    for file in files:
        assert (ROOT / "src" / "brorl" / file).exists(), file


def test_recipes_are_found_by_name_and_by_path() -> None:
    paper = {*PUBLISHED, "small/prorl", "small/brorl"}
    own = {"quickstart", "quickstart-16", "long", "plateau-16", "plateau-512", "calculator"}
    assert paper | own == set(builtin_recipes())
    for name in builtin_recipes():
        assert read_recipe(str(FOLDER / f"{name}.yaml")) == read_recipe(name)


EXAMPLES = sorted(set((ROOT / "examples").rglob("*.yaml")) - {ROOT / "examples" / "plateau" / "study.yaml"})  # of arms


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_recipes_of_the_examples_are_valid(path: Path) -> None:
    assert make_config(read_recipe(str(path)), {}, str(path))
