"""The recipes that ship: every value marked, the paper's numbers, and a page that says the same."""

import re
from math import sqrt
from pathlib import Path

import pytest

import brorl
from brorl.algorithms.settings import AdvantageSettings
from brorl.assemble.learner import build_learner_settings
from brorl.config.reading import builtin_recipes, make_config, read_recipe
from brorl.config.settings import TrainConfig
from brorl.model.forward import TreeForward
from brorl.prompts.layouts.table import LAYOUTS
from brorl.prompts.rendering import TEMPLATES
from brorl.prompts.settings import FileSource
from brorl.verification.domains.table import DOMAINS

ROOT = Path(__file__).parents[1]
FOLDER = Path(brorl.__file__).parent / "recipes"
CLUSTERS = {"brorl-1gpu": 1, "brorl-8gpu": 8, "brorl-64gpu": 64}
MARK = re.compile(r"\((P|V2|V1|I|S|O)\)")


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


@pytest.mark.parametrize("name", ["prorl", "brorl", "small/prorl", "small/brorl", "broaden", "sharpen", *CLUSTERS])
def test_every_value_carries_its_mark(name: str) -> None:
    settings = settings_of(name)
    assert len(settings) > 40
    assert [key for key, (_, comment) in settings.items() if not MARK.search(comment)] == []


@pytest.mark.parametrize(("first", "second"), [("prorl", "brorl"), ("small/prorl", "small/brorl")])
def test_the_second_stage_differs_only_where_the_paper_says(first: str, second: str) -> None:
    one, other = (make_config(read_recipe(n), {}, n).model_dump() for n in (first, second))
    differing = {name for name in one if one[name] != other[name]} - {"checkpoint_every", "store_rollouts_every"}
    assert differing <= {"model", "rollouts_per_prompt", "prompts_per_step", "steps", "evaluation"}
    assert {k for k in one["evaluation"] if one["evaluation"][k] != other["evaluation"][k]} <= {"every"}
    rates = [build_learner_settings(config(n), (0,), TreeForward()).learning_rate for n in (first, second)]
    assert rates[1] == pytest.approx(sqrt(8) * rates[0])
    assert config(second).samples_per_step == 8 * config(first).samples_per_step
    assert config(first).prompts_per_step == 4 * config(second).prompts_per_step


@pytest.mark.parametrize("name", ["broaden", "sharpen"])
def test_our_own_recipes_differ_from_the_papers_in_the_objective_alone(name: str) -> None:
    paper, own = (make_config(read_recipe(n), {}, n).model_dump() for n in ("brorl", name))
    assert {key for key in paper if paper[key] != own[key]} == {"phases" if name == "broaden" else "advantage"}
    texts = [text for key, text in settings_of(name).items() if key.startswith(("phases", "advantage"))]
    assert texts
    assert all("(O)" in comment for _, comment in texts)


@pytest.mark.parametrize(("name", "gpus"), CLUSTERS.items())
def test_the_recipes_of_clusters_differ_from_the_papers_in_sizes_alone(name: str, gpus: int) -> None:
    paper, own = (make_config(read_recipe(n), {}, n) for n in ("brorl", name))
    differing = {key for key, value in paper.model_dump().items() if own.model_dump()[key] != value}
    sizes = {"prompts_per_step", "sampling", "evaluation"} if gpus == 1 else set()
    assert differing == {"cluster", "engine", *sizes}
    assert [
        comment for key, (_, comment) in settings_of(name).items() if key.startswith("cluster") and "(O)" not in comment
    ] == []
    cluster = own.cluster
    sampling = cluster.rollout_workers * cluster.gpus_per_rollout_worker
    learning = cluster.learner_ranks * cluster.gpus_per_learner_rank
    used = max(sampling, learning) if cluster.placement == "colocated" else sampling + learning
    assert used == gpus
    assert cluster.nodes == max(1, gpus // 8)


@pytest.mark.parametrize("name", ["prorl", "brorl", "small/prorl", "small/brorl"])
def test_the_papers_recipes_have_the_papers_advantages(name: str) -> None:
    assert config(name).phases == ()
    assert config(name).advantage == AdvantageSettings(estimator="reinforce_pp_baseline")


def test_the_papers_numbers() -> None:
    first, second = config("prorl"), config("brorl")
    assert (first.rollouts_per_prompt, first.prompts_per_step, first.samples_per_step) == (16, 512, 8192)
    assert (second.rollouts_per_prompt, second.prompts_per_step, second.samples_per_step) == (512, 128, 65536)
    assert (second.evaluation.temperature, second.evaluation.top_p, second.evaluation.num_samples) == (0.6, 0.95, 16)
    for stage in (first, second):
        assert stage.data.max_prompt_tokens + stage.sampling.max_new_tokens == 16384
        assert stage.data.max_prompt_tokens + (stage.evaluation.max_new_tokens or 0) == 32768
        learner = build_learner_settings(stage, (0,), TreeForward())
        assert (learner.loss.kind, learner.loss.clip_low, learner.loss.clip_high) == ("ppo", 0.2, 0.27)
        assert learner.kl is not None
        assert (learner.kl.coefficient, learner.kl.estimator, learner.kl.placement) == (1e-4, "k2", "loss")
        assert learner.importance.correction == "truncate"
        assert learner.recompute_old_logprobs
        shaping = stage.rewards
        assert shaping.stop_properly == 0
        assert (shaping.cosine_length.on_steps, shaping.cosine_length.every_steps) == (100, 500)


@pytest.mark.parametrize("name", ["prorl", "brorl", "broaden", "sharpen"])
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
            assert source.path in LAYOUTS[source.layout].data_sets
    style = recipe.prompt
    for domain, template in TEMPLATES.items():
        wanted = ("\\boxed{}" in template, "<answer>" in template)
        assert ("\\boxed{}" in style.fill("", domain), "<answer>" in style.fill("", domain)) == wanted


def test_the_page_maps_every_line_of_both_recipes() -> None:
    """`docs/reference/recipe.md` has a row for every setting, with both values, both marks, and code that exists."""
    first, second = settings_of("prorl"), settings_of("brorl")
    rows = [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in (ROOT / "docs" / "reference" / "recipe.md").read_text().splitlines()
        if line.startswith("| `") and line.count("|") == 6
    ]
    assert [row[0].strip("`") for row in rows] == list(first) == list(second)
    for key, one, other, source, code in rows:
        (value, comment), (second_value, second_comment) = first[key.strip("`")], second[key.strip("`")]
        assert one == f"`{value}`"
        assert other == ("same" if second_value == value else f"`{second_value}`")
        assert MARK.findall(source) == MARK.findall(comment if comment == second_comment else comment + second_comment)
        for file in re.findall(r"`([^`]+)`", code):
            assert (ROOT / "src" / "brorl" / file).exists(), file


def test_recipes_are_found_by_name_and_by_path() -> None:
    paper = {"prorl", "brorl", "small/prorl", "small/brorl"}
    own = {"quickstart", "quickstart-16", "long", "plateau-16", "plateau-512", "broaden", "sharpen"}
    assert paper | own | {*CLUSTERS} == set(builtin_recipes())
    for name in builtin_recipes():
        assert read_recipe(str(FOLDER / f"{name}.yaml")) == read_recipe(name)


EXAMPLES = sorted(set((ROOT / "examples").rglob("*.yaml")) - {ROOT / "examples" / "plateau" / "study.yaml"})  # of arms


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_recipes_of_the_examples_are_valid(path: Path) -> None:
    assert make_config(read_recipe(str(path)), {}, str(path))
