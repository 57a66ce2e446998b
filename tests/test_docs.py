"""The documentation against the program: metrics, files, settings, commands, errors; and its links and lists."""

import ast
import importlib.util
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import is_dataclass
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from ruamel.yaml import YAML

import losing_function
from async_support import WordyEngine, virtual_collector
from brorl.cli import COMMANDS, make_parser
from brorl.config.reading import parse_yaml, setting_fields
from brorl.config.settings import TrainConfig
from brorl.errors import UserError
from brorl.format import Estimate
from brorl.reporting.page import make_page
from brorl.reporting.summary import COSTS, SCORES, TOOLS
from brorl.runs.run_directory import read_runs
from brorl.runs.step_record import KEYS, StepRecord, to_json
from brorl.storage import dotted_items
from brorl.tools.calls import Failure
from brorl.verification.domains.verifiers import DOMAINS
from run_support import SMALL, command

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
TRY = "python3 -m venv .venv && .venv/bin/pip install -e . && .venv/bin/brorl train"
TEST = "python3 -m venv .venv && .venv/bin/pip install -e '.[dev]' && .venv/bin/pytest"
SOURCES = ("small puzzles", "pairs")
TERM = "same"
MEASURED = (  # all that a run of fixed N can measure
    "--steps=10",
    "--phases=[{name: broaden, until: 0.5, advantage: {estimator: maxrl}}, {name: sharpen}]",
    "--prompts_per_step=2",
    "--optimizer.old_logprobs=recompute",
    "--importance.correction=truncate",
    "--loss.entropy_coefficient=0.001",
    "--kl.coefficient=0.01",
    "--reference.reset_every=5",
    "--collapse.reference_kl=1e-12",
    "--diagnostics.held_out_check_every=5",
    "--diagnostics.held_out_rollouts=8",
    "--store_rollouts_every=0",
    f"--rewards.terms={{{TERM}: {{function: 'operator:eq', weight: 0.1}}}}",
    "--evaluation.every=0",
    f"--data.sources=[{{task: countdown, max_number: 7, name: {SOURCES[0]}}}, "
    f"{{task: countdown, num_numbers: 2, max_number: 9, name: {SOURCES[1]}}}]",
)
TOOLS_FORM = """
def parse(text):
    return [{"name": text.strip()[:1], "arguments": {"expression": text}}] if "*" in text and ":" not in text else []


def render(results):
    return ":" + results[0][1][:4] + ">"
"""
WITH_TOOLS = (
    "--steps=1",
    "--tools.calculator=true",
    "--tools.max_turns=2",
    "--tools.max_result_tokens=8",
    "--sampling.max_new_tokens=8",
)
FRUITLESS = ("--steps=1", "--sampling.max_new_tokens=1", "--dynamic_sampling.max_tries=1")


def keys_of(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted keys of a metrics record; a number, the name of a source or a term, or a reason is `*`."""
    for key, inner in value.items():
        name = f"{prefix}{'*' if key.isdigit() or key in (*SOURCES, TERM, *Failure) or ': ' in key else key}"
        if isinstance(inner, dict):
            yield from keys_of(inner, f"{name}.")
        else:
            yield name, inner


def first_cells(page: str) -> list[str]:
    """Return the names in backticks in the first column of all tables of a page."""
    cells = re.findall(r"^\|([^|]*)\|", (DOCS / page).read_text("utf-8"), re.MULTILINE)
    return [name for cell in cells for name in re.findall("`([^`]+)`", cell)]


LOSING = (
    "--steps=1", "--evaluation.num_prompts=4", "--verification.workers=1",
    f"--verification.functions={{countdown: {losing_function.__file__}:verify}}",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Five real runs: all measurements, no correct rollout, calls of unknown tools, lost verdicts, no verdict."""
    folders: list[Path] = []
    form = tmp_path_factory.mktemp("docs") / "form.py"
    form.write_text(TOOLS_FORM)
    called = (*WITH_TOOLS, f"--tools.format={form}")
    for name, settings, code in (("measured", MEASURED, 0), ("fruitless", FRUITLESS, 1), ("called", called, 0)):
        folders.append(tmp_path_factory.mktemp("docs") / name)
        outcome = command("train", *SMALL, *settings, "--output_dir", folders[-1])
        assert outcome.code == code, outcome.err
    with pytest.MonkeyPatch.context() as patch:
        for mode, code in (("many", 0), ("all", 1)):
            patch.setenv("LOSING", mode)
            folders.append(tmp_path_factory.mktemp("docs") / mode)
            outcome = command("train", *SMALL, *LOSING, "--output_dir", folders[-1])
            assert outcome.code == code, outcome.err
    return folders


@pytest.fixture(scope="module")
def written(runs: list[Path]) -> dict[str, set[bool]]:
    """The keys that real runs and an asynchronous collector write, each with whether it was null."""
    found: dict[str, set[bool]] = {}
    for run in runs:
        for line in (run / "metrics.jsonl").read_text().splitlines():
            for key, value in keys_of(json.loads(line)):
                found.setdefault(key, set()).add(value is None)
    collector, pool = virtual_collector(
        WordyEngine(), duration=lambda task, _: 99.0 if task.prompts == [(100,)] else 1.0
    )
    collector.publish([], 0)
    for step in range(1, 5):  # an asynchronous step writes these, too
        line = json.dumps(to_json(StepRecord(step=step, sampling=collector.next_batch(step).summary())))
        for key, value in keys_of(json.loads(line)):
            found.setdefault(key, set()).add(value is None)
        pool.advance(1.0)
        collector.publish([], step)
    return found


@pytest.mark.slow
def test_every_key_of_the_metrics_is_documented(written: dict[str, set[bool]]) -> None:
    documented = set(first_cells("reference/metrics.md"))
    null_as_a_whole = {key for key, nulls in written.items() if nulls == {True} and f"{key}.*" in documented}
    assert set(written) - documented - null_as_a_whole == set()


@pytest.mark.slow
def test_every_documented_key_of_the_metrics_is_written(written: dict[str, set[bool]]) -> None:
    documented = first_cells("reference/metrics.md")
    assert len(documented) == len(set(documented))
    assert set(documented) - set(written) == set()


def documented_fields(record: type[Any], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield the keys of a record with their unit (or when they are written) and meaning, as the fields say."""
    for name, hint in get_type_hints(record, include_extras=True).items():
        texts = [text for text in getattr(hint, "__metadata__", ()) if isinstance(text, str)]
        plain = get_args(hint)[0] if texts else hint
        key = f"{prefix}{KEYS.get(name, name)}"
        if texts:
            yield key, texts
        for inner in (plain, *get_args(plain)):
            if is_dataclass(inner) and inner is not Estimate:
                yield from documented_fields(inner, f"{key}.")  # type: ignore[arg-type]


def test_the_page_of_the_metrics_says_what_the_fields_say() -> None:
    page = re.sub(r" \(\[[^]]*\]\([^)]*\)\)", "", (DOCS / "reference/metrics.md").read_text("utf-8"))  # without links
    rows: dict[str, list[str]] = {}
    for keys, unit, meaning in re.findall(r"^\| (`[^|]*`) \|([^|]*)\| ([^|]*) \|$", page, re.MULTILINE):
        for key in re.findall("`([^`]+)`", keys):
            rows.setdefault(key.partition(".*")[0], [unit.strip(), meaning])
    fields = {key: texts for key, texts in documented_fields(StepRecord) if not key.startswith("ema_evaluation.")}
    assert len(fields) > 100
    assert {key: rows.get(key) for key in fields} == fields


@pytest.mark.slow
def test_every_file_of_a_run_is_documented(runs: list[Path]) -> None:
    documented = first_cells("reference/run_directory.md")
    for run in runs:
        files = {
            str(file.relative_to(run)) for file in run.rglob("*") if file.is_file() and not file.name.startswith(".")
        }
        assert {file for file in files if not any(fnmatch(file, f"{name}*") for name in documented)} == set()


def script(name: str) -> Any:
    """Load a file of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["make_settings_reference", "make_command_reference"])
def test_a_generated_page_is_up_to_date(name: str) -> None:
    module = script(name)
    assert module.page() == module.PAGE.read_text("utf-8"), f"run: python scripts/{name}.py"


@pytest.mark.slow
def test_the_page_of_what_fits_is_up_to_date() -> None:
    """It makes 7B on the meta device many times."""
    test_a_generated_page_is_up_to_date("make_what_fits")


def templates(source: str) -> Iterator[str]:
    """Yield every text of a Python file, adjacent ones joined, with `<>` instead of each value in an f-string."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_quoted_errors_are_those_of_the_source() -> None:
    """Each quote, with `<...>` instead of values, must be part of one text of the source."""
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    quotes = [re.sub("<[^>]*>", "<>", " ".join(q.split())) for q in re.findall(r"```text\n(.*?)```", page, re.DOTALL)]
    assert quotes
    texts = [text for file in (ROOT / "src").rglob("*.py") for text in templates(file.read_text("utf-8"))]
    assert [quote for quote in quotes if not any(quote in text for text in texts)] == []


def test_every_list_of_domains_is_that_of_the_program() -> None:
    table = re.findall(r"^\| `(\w+)` \|", section(DOCS / "status.md", "Six domains"), re.MULTILINE)
    [cause] = re.findall(r"exist for (.*?)\.", section(DOCS / "troubleshooting.md", "A domain without a verifier"))
    [built_in] = re.findall(r"\n(`code`.*?) are built in", (DOCS / "how-to" / "verifiers.md").read_text("utf-8"))
    for found in (table, re.findall(r"`(\w+)`", cause), re.findall(r"`(\w+)`", built_in)):
        assert sorted(found) == sorted(DOMAINS)


def section(page: Path, heading: str) -> str:
    """Return the text of a page below a heading, to the next one."""
    return page.read_text("utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]


def test_every_extra_that_is_named_exists() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    for page in [*PAGES, *(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.md")]:
        found = re.findall(r"""install (?:-e )?["'](?:brorl|\.)\[([\w,]+)\]["']""", page.read_text("utf-8"))
        assert {name for names in found for name in names.split(",")} <= extras, page


def test_no_page_installs_a_release() -> None:
    """The package is on no index: pages install from the checkout. Quoted errors name extras of what is installed."""
    for page in [*PAGES, *(ROOT / "examples").rglob("*.md")]:
        text = re.sub(r"```text\n.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
        assert re.findall(r"pip install[^\n]*[ '\"]brorl(?![./\w-]).*", text) == [], page


@pytest.mark.slow
def test_the_page_about_the_report_names_its_parts(runs: list[Path]) -> None:
    page, html = DOCS / "how-to" / "report.md", make_page(read_runs([runs[0], runs[2]]))
    rows = re.findall(r"^\|([^|]*)\| ([^|]+) \|[^|]+\|$", section(page, "The charts"), re.MULTILINE)[1:]
    charts = re.findall(r"<article[^>]*>\s*<h3>(.*?)</h3>", html)
    charts = [re.sub(r"pass@\d+ \(", "pass@k (", title.removesuffix(" (last 25 steps)")) for title in charts]
    assert sorted(chart for _, chart in rows) == sorted(charts)
    sections = [name.strip() for name, _ in rows if name.strip()]
    assert [*sections, "Rollouts", "Settings and machine"] == re.findall(r"<h2[^>]*-title\">(.*?)</h2>", html)
    columns = re.findall(r"^\| ([^`|]+) \|", section(page, "The summary"), re.MULTILINE)[1:]
    assert {name for cell in columns for name in cell.split(", ")} == {*SCORES, *COSTS, *TOOLS}


def test_the_settings_of_other_trainers_map_to_settings() -> None:
    page = DOCS / "how-to" / "from_trl_or_verl.md"
    names = {name for name, _ in setting_fields(TrainConfig)}
    groups = {name.rpartition(".")[0] for name in names}
    for title in ("Rollouts and batches", "Objective", "Engine, machines and files"):
        rows = [row.split("|") for row in section(page, title).splitlines() if row.startswith("| ")][1:]
        cells = re.findall(r"`([a-z_.*]+)[:`]", " ".join(row[3] for row in rows))
        assert [c for c in cells if c not in names and c.removesuffix(".*") not in groups] == []
    defaults = dict(dotted_items(TrainConfig().model_dump(mode="json"))) | {
        "loss.clip_high": TrainConfig().loss.clip.high
    }
    rows = re.findall(r"^ +\| `([a-z_.]+)` \| `?(.*?)`? \|", section(page, "Carry a config over"), re.MULTILINE)
    assert len(rows) > 10
    assert {name: parse_yaml(shown, page.name) for name, shown in rows} == {name: defaults[name] for name, _ in rows}


def commands_of(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `brorl` command in the shell blocks of a page."""
    for block in re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
            lexer.whitespace_split = True
            for is_command, words in groupby(lexer, lambda word: not re.fullmatch(r"[|;&<>]+", word)):
                command = list(words)
                named = [i for i, word in enumerate(command) if word.rpartition("/")[2] == "brorl"]
                if is_command and named:
                    yield command[named[0] + 1 :]


def test_every_command_of_the_pages_is_understood() -> None:
    """Each option and setting exists, and takes such a value."""
    parser, number = make_parser(COMMANDS), 0
    for page in [*PAGES, *(ROOT / "examples").rglob("*.md")]:
        for arguments in commands_of(page):
            number += 1
            if arguments in (["--version"], ["--help"]):
                continue
            try:
                _, unknown = parser.parse_known_args(arguments)
            except UserError as error:
                raise AssertionError(f"{page.name}: brorl {shlex.join(arguments)}") from error
            assert unknown == [], f"{page.name}: brorl {shlex.join(arguments)}"
    assert number > 80


def without_code(page: Path) -> str:
    """Return the text of a page without its blocks of code, whether fenced or indented."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<=\n\n)(?:    .*\n|\n)+", "\n", text)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as the site and hosts of repositories make them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield the links of a page that do not leave the project: the link, the file it leads to, the heading."""
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page)):
        if not link.startswith(("http:", "https:")):
            path, _, heading = link.partition("#")
            yield link, (page.parent / path).resolve() if path else page, heading


def test_the_measured_tables_are_printed_with_every_cell() -> None:
    """All files but the tables that are computed from runs; a page names only files and sections that exist."""
    module = script("print_tables")
    for name in module.FILES:
        sections = module.sections(name)
        titles = [section["title"] for section in sections if section["title"] != module.RUNS]
        assert len(titles) == len({*titles}) > 0
        printed = "\n".join(part for title in titles for part in module.printed(name, title))
        cells = {cell for s in sections for table in s["tables"] for row in table["rows"] for cell in row}
        assert {cell for cell in cells if cell not in printed} == set(), name
    for page in PAGES:
        for name, part in re.findall(r"print_tables\.py\s+(\w+)(?: \"([^\"]*)\")?`", page.read_text("utf-8")):
            assert any(part.lower() in section["title"].lower() for section in module.sections(name)), page.name


def test_links_lead_somewhere() -> None:
    broken = [
        f"{page.name}: {link}"
        for page in PAGES
        for link, target, heading in links(page)
        if not target.exists() or (heading and heading not in anchors(target))
    ]
    assert broken == []


def test_links_of_the_site_stay_in_the_site() -> None:
    pages = [page for page in PAGES if page.is_relative_to(DOCS)]
    assert [f"{p.name}: {link}" for p in pages for link, to, _ in links(p) if not to.is_relative_to(DOCS)] == []


def leaves(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation in their order."""
    for entry in nav:
        ((_, target),) = entry.items()
        yield from [target] if isinstance(target, str) else leaves(target)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(leaves(YAML(typ="safe").load(ROOT / "mkdocs.yml")["nav"]))
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_the_index_lists_every_page() -> None:
    """The pages of the Python API have an index in their own folder."""
    for index, folder in ((DOCS / "index.md", DOCS), (DOCS / "reference" / "api" / "index.md", DOCS / "reference/api")):
        listed = {target for _, target, _ in links(index) if target.is_relative_to(folder)}
        api = {page for page in DOCS.rglob("*.md") if page.parent.name == "api"}
        pages = api if folder.name == "api" else set(DOCS.rglob("*.md")) - api | {DOCS / "reference/api/index.md"}
        assert pages - {index} <= listed
    assert "(docs/index.md)" in (ROOT / "README.md").read_text("utf-8")


def test_lists_follow_a_blank_line() -> None:
    """The site shows the items of a list as one paragraph if the list follows a paragraph directly."""
    item = re.compile(r" *(?:[-*]|\d+\.) ")
    joined = []
    for page in PAGES:
        lines = without_code(page).splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            if item.match(line) and before.strip() and not item.match(before) and not before.startswith("  "):
                joined.append(f"{page.name}: {line}")
    assert joined == []


def test_every_path_of_the_project_that_is_named_exists() -> None:
    """In pages, recipes, docstrings and comments. A page names files of the package from the package's folder too."""
    sources = [f for folder in ("src", "benchmarks", "scripts", "examples") for f in (ROOT / folder).rglob("*")]
    texts = [*PAGES, *(f for f in sources if f.suffix in (".md", ".py", ".yaml", ".sh"))]
    path = re.compile(r"(?<![\w./-])(?:benchmarks|docs|examples|scripts|tests)/[\w/]+\.(?:json|md|py|sh|yaml)\b")
    named = [(file.name, name) for file in texts for name in path.findall(file.read_text("utf-8"))]
    assert {(file, name) for file, name in named if "NAME" not in name and not (ROOT / name).exists()} == set()
    roots = (ROOT, ROOT / "src" / "brorl", DOCS)
    for page in (ROOT / "CONTRIBUTING.md", DOCS / "status.md"):
        names = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|\w+\.(?:py|md|toml))`", page.read_text("utf-8"))
        found = {name for name in names if "your_" not in name} - {"site/"}
        assert len(found) > 8
        assert {name for name in found if not any((root / name).exists() for root in roots)} == set()


def test_the_readme_has_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"\n    {TRY}\n" in readme
    assert f"\n    {TEST}\n" in readme
    assert TRY in (DOCS / "tutorials" / "first_run.md").read_text("utf-8")
