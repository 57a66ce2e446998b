"""`brorl plan --cluster`: tables, files, and one line for whatever cannot work; nothing is measured or loaded."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

import brorl
from brorl.api.cluster_plan import ClusterPlanResult
from brorl.errors import UserError
from brorl.planning.cluster import cluster_plan
from run_support import SMALL, command, save_tiny_model

SHAPE = "parameters=1.78e9,layers=28,hidden=1536,heads=12,kv_heads=2,vocabulary=151936"


pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


@pytest.fixture(autouse=True)
def offline_and_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    scale = cluster_plan.scale  # of few sizes: a simulation of hundreds of GPUs takes a second
    monkeypatch.setattr(cluster_plan, "scale", lambda job, way, sizes, s: scale(job, way, sizes[:2], s))


def planned(folder: str = "runs/plan") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(folder, "plan.json").read_text())
    return found


def test_the_papers_step_without_the_hub() -> None:
    outcome = command("plan", "--cluster", "8xH100", "--engine", "vllm", "--output-dir", "out")
    assert outcome.code == 0, outcome
    assert outcome.err == ""
    assert "1,777,088,000 parameters) on 8xH100, vllm engine" in outcome.said
    assert "128 prompts x 512 rollouts" in outcome.said
    assert "No figure of a GPU was measured" in outcome.said
    assert "…" not in outcome.out
    record = planned("out")
    assert (record["work"]["prompts"], record["work"]["rollouts"], record["work"]["max_length"]) == (128, 512, 15360)
    assert record["work"]["origins"]["mean_length"] == "assumed"
    assert {cost["origin"] for cost in record["unit_costs"]} == {"published", "measured here", "assumed"}
    assert all(cost["source"] for cost in record["unit_costs"])
    assert {(way["placement"], way["mode"]) for way in record["ways"]} == set(cluster_plan.WAYS)
    for way in record["ways"]:
        assert way["seconds"]["best"]["total"] < way["seconds"]["worst"]["total"]
    assert all(line in outcome.said for line in record["lines"])
    assert outcome.said.index(record["lines"][0]) < outcome.said.index("Seconds of a step on 8xH100")
    assert imread("out/plan.png").std() > 0.05
    assert sorted(p.name for p in Path("out").iterdir()) == ["plan.json", "plan.png"]


def test_a_recipe_by_name_and_settings(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    (model / "model.safetensors").unlink()  # the config is enough
    outcome = command(
        "plan", "quickstart", "--cluster=4xL4", f"--model={model}", "--prompts_per_step=8", "--response-tokens=10",
        "--distinct-fraction=0.1", "--group-parts=2",
    )  # fmt: skip
    assert outcome.code == 0, outcome
    record = planned()
    assert record["shape"]["layers"] == 1
    assert record["engine"] == "native"
    assert (record["work"]["prompts"], record["work"]["distinct_fraction"], record["work"]["mean_length"]) == (
        8,
        0.1,
        10,
    )
    assert record["work"]["origins"]["distinct_fraction"] == "given"
    assert record["simulation"]["parts"] == 2


@pytest.mark.slow
def test_a_run_gives_its_measurements() -> None:
    assert command("train", *SMALL, "--steps=2", "--evaluation.num_prompts=0", "--output_dir=run").code == 0
    outcome = command("plan", "run", "--cluster=2xA100")
    assert outcome.code == 0, outcome
    steps = [json.loads(line).get("sampling") for line in Path("run/metrics.jsonl").read_text().splitlines()]
    sums = {
        k: sum(s[k] for s in steps if s)
        for k in ("unique_tokens", "sampled_tokens", "samples", "groups_mixed", "groups")
    }
    work = planned()["work"]
    assert work["distinct_fraction"] == pytest.approx(sums["unique_tokens"] / sums["sampled_tokens"])
    assert work["mean_length"] == pytest.approx(sums["sampled_tokens"] / sums["samples"])
    assert work["kept_fraction"] == pytest.approx(sums["groups_mixed"] / sums["groups"])
    assert set(work["origins"].values()) == {"assumed", "measured here"}  # prompts are not in the metrics


@pytest.mark.slow
def test_the_function_plans_as_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {name: float(value) for name, value in re.findall(r"(\w+)=([^,]+)", SHAPE)}
    result = brorl.plan_cluster(
        "8xH200", "brorl", engine="vllm", model_shape=sizes, output_dir="mine", progress=False, model="some/model"
    )
    assert capsys.readouterr().out == ""
    assert isinstance(result, ClusterPlanResult)
    outcome = command(
        "plan", "brorl", "--model=some/model", "--cluster=8xH200", "--engine=vllm", f"--model-shape={SHAPE}",
        "--output-dir=theirs",
    )  # fmt: skip
    assert outcome.code == 0, outcome
    assert planned("mine") == planned("theirs")
    assert "Seconds of a step on 8xH200" in result._repr_html_()


def test_a_model_that_is_too_large() -> None:
    shape = "parameters=6.7e11,layers=61,hidden=7168,kv_heads=128,vocabulary=129280"
    outcome = command("plan", "--cluster=1xL4", f"--model-shape={shape}")
    assert outcome.code == 0, outcome
    assert "The step does not fit on 1xL4." in outcome.said
    state = 6.7e11 * (4 + 4 + 8 + 4) / 2**30  # weights, gradients, two moments, reference
    assert f"the learner needs {state:,.1f} GiB of state" in outcome.said
    assert planned()["ways"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cluster=8xH300"], "'H300' is not a known GPU (A100, B200, H100, H200, L4, L40S, MI300X and RTX4090)"),
        (["--cluster=8xH100", "--aim=coverage"], "--aim measures on this machine, and --cluster does not"),
        (["--response-tokens=100"], "--response-tokens needs --cluster"),
        (["--cluster=8xH100", "--response-tokens=99999"], "between 1 and sampling.max_new_tokens = 15,360, got 99999"),
        (["--cluster=8xH100", "--distinct-fraction=1.5"], "--distinct-fraction must be in (0, 1], got 1.5"),
        (["--cluster=8xH100", "--model-shape=parameters=1e9"], "--model-shape is missing layers"),
        (["--cluster=8xH100", "--model-shape=parameters=much"], "expected parameters=1.5e9,layers=28"),
        (["--cluster=8xH100", "--group-parts=0"], "group_parts must be at least 1, got 0"),
        (["--cluster=8xH100", "--model=nobody/nothing"], "or give them: --model-shape parameters=1.78e9"),
        (["missing.yaml", "--cluster=8xH100"], "is neither a file nor a built-in recipe"),
        (["--cluster=8xH100", "--output-dir=/proc/plan"], "cannot write to --output-dir /proc/plan"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], said: str) -> None:
    outcome = command("plan", *arguments)
    assert outcome.code == 2, outcome
    assert said in outcome.err
    assert outcome.err.count("\n") == 1
    assert sorted(Path().rglob("*")) == []


def test_an_unknown_engine_from_python() -> None:
    with pytest.raises(UserError, match="engine must be one of native, vllm, got hf"):
        brorl.plan_cluster("8xH100", engine="hf")  # type: ignore[arg-type]
