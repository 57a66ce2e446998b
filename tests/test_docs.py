"""The pages under docs/ against the program: keys of metrics.jsonl, settings, texts of errors, links."""

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from brorl.config.reading import settings_of
from brorl.config.settings import TrainConfig
from brorl.config.sources import CountdownConfig, FileConfig
from run_support import SMALL, command

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = ("small puzzles", "pairs")
MEASURED = (  # all that a run of fixed N can measure
    "--steps=10",
    "--prompts_per_step=2",
    "--optimizer.old_logprobs=recompute",
    "--importance.correction=truncate",
    "--loss.entropy_coefficient=0.001",
    "--kl.coefficient=0.01",
    "--reference.reset_every=5",
    "--collapse.reference_kl=1e-12",
    "--diagnostics.certificate_every=5",
    "--diagnostics.held_out_rollouts=8",
    "--store_rollouts_every=0",
    "--evaluation.every=0",
    f"--data.sources=[{{task: countdown, max_number: 7, name: {SOURCES[0]}}}, "
    f"{{task: countdown, num_numbers: 2, max_number: 9, name: {SOURCES[1]}}}]",
)
ADAPTIVE = (
    "--steps=1",
    "--rollouts_per_prompt=adaptive",
    "--adaptive.pilot_rollouts=4",
    "--adaptive.samples_per_prompt=8",
    "--adaptive.max_rollouts=16",
    "--evaluation.num_prompts=0",
)
FRUITLESS = ("--steps=1", "--sampling.max_new_tokens=1", "--dynamic_sampling.max_tries=1")


def keys_of(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a line of the metrics; a number or the name of a source is `*`."""
    for key, inner in value.items():
        name = f"{prefix}{'*' if key.isdigit() or key in SOURCES else key}"
        if isinstance(inner, dict):
            yield from keys_of(inner, f"{name}.")
        else:
            yield name, inner


def first_cells(page: str, heading: str) -> list[str]:
    """Return what stands in backticks in the first column of the tables below a heading."""
    text = (ROOT / "docs" / page).read_text("utf-8")
    below = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert below, f"docs/{page} has no heading {heading!r}"
    cells = re.findall(r"^\|([^|]*)\|", below, re.MULTILINE)
    return [name for cell in cells for name in re.findall("`([^`]+)`", cell)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[bool]]:
    """The keys that real runs write, each with whether it was null."""
    found: dict[str, set[bool]] = {}
    for name, settings, code in (("measured", MEASURED, 0), ("adaptive", ADAPTIVE, 0), ("fruitless", FRUITLESS, 1)):
        run = tmp_path_factory.mktemp("docs") / name
        outcome = command("train", *SMALL, *settings, "--output_dir", run)
        assert outcome.code == code, outcome.err
        for line in (run / "metrics.jsonl").read_text().splitlines():
            for key, value in keys_of(json.loads(line)):
                found.setdefault(key, set()).add(value is None)
    return found


def test_every_key_of_the_metrics_is_documented(written: dict[str, set[bool]]) -> None:
    documented = set(first_cells("reference/runs.md", "What metrics.jsonl holds"))
    null_as_a_whole = {key for key, nulls in written.items() if nulls == {True} and f"{key}.*" in documented}
    assert set(written) - documented - null_as_a_whole == set()


def test_every_documented_key_of_the_metrics_is_written(written: dict[str, set[bool]]) -> None:
    documented = first_cells("reference/runs.md", "What metrics.jsonl holds")
    assert len(documented) == len(set(documented))
    assert set(documented) - set(written) == set()


def test_the_settings_reference_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("settings_page", ROOT / "scripts" / "make_settings_reference.py")
    assert spec
    assert spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.page() == script.PAGE.read_text("utf-8"), "run: python scripts/make_settings_reference.py"


def test_the_settings_reference_names_every_setting() -> None:
    """The generator's own walk over the classes, against the one behind `brorl train --help`."""
    page = (ROOT / "docs" / "reference" / "settings.md").read_text("utf-8")
    named = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    in_sources = {*CountdownConfig.model_fields, *FileConfig.model_fields}
    assert named - in_sources == {name for name, _ in settings_of(TrainConfig)} - in_sources
    assert in_sources <= named


def templates(source: str) -> Iterator[str]:
    """Yield every text of a Python file, adjacent ones joined, with `<>` in place of each value in an f-string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_quoted_errors_are_those_of_the_source() -> None:
    """Each quote, with `<...>` in place of values, must be part of one text of the source."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    quotes = [re.sub("<[^>]*>", "<>", " ".join(q.split())) for q in re.findall(r"```text\n(.*?)```", page, re.DOTALL)]
    assert len(quotes) == page.count("\n## ")
    texts = [text for file in (ROOT / "src").rglob("*.py") for text in templates(file.read_text("utf-8"))]
    assert [quote for quote in quotes if not any(quote in text for text in texts)] == []


def anchors(page: Path) -> set[str]:
    """Return what a link to a heading of a page may name."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            if not link.startswith(("http:", "https:")) and (
                not target.exists() or (heading and heading not in anchors(target))
            ):
                broken.append(f"{page.name}: {link}")
    assert broken == []


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    listed = re.findall(r"^- \[[^]]+\]\(([^)]+\.md)\)", index, re.MULTILINE)
    assert len(listed) == len(set(listed))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent != ROOT}
    assert {name for name in listed if not name.startswith("..")} == pages - {"index.md"}
    assert "(docs/index.md)" in (ROOT / "README.md").read_text("utf-8")
