"""The search of the site, opened from disk in a browser."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from chromium import Chromium, chromium_or_skip

ROOT = Path(__file__).parents[1]
SEARCH = "[...document.querySelectorAll('body > *')].find((element) => element.shadowRoot)?.shadowRoot"


@pytest.mark.slow
@pytest.mark.chromium
def test_the_search_works_without_a_server(tmp_path: Path) -> None:
    """It runs in a worker, which a page from disk cannot start: docs/iframe-worker.js stands for it."""
    browser = chromium_or_skip()
    yaml = YAML(typ="safe")
    config = yaml.load(ROOT / "mkdocs.yml")
    config |= {"nav": [{"Home": "index.md"}], "plugins": ["offline", "search"], "markdown_extensions": []}
    yaml.dump(config, tmp_path / "mkdocs.yml")
    (tmp_path / "docs").mkdir()
    for name in ("iframe-worker.js", "site.css"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs" / name)
    (tmp_path / "docs" / "index.md").write_text("# Home\n\nOne page.\n\n## A rare word\n\nQuokkas are here.\n")
    builder = Path(sys.executable).with_name("zensical")
    subprocess.run([builder, "build", "--strict"], cwd=tmp_path, check=True, capture_output=True)
    with Chromium(browser) as page:
        page.call("Page.navigate", url=(tmp_path / "site" / "index.html").as_uri())
        page.wait_for(f"!!{SEARCH}")
        page.value("document.querySelector('.md-search__button').click()")
        page.wait_for(f"{SEARCH}.activeElement?.tagName === 'INPUT'")
        for typed in ("quo", "quokka"):
            page.call("Input.insertText", text=typed[-3:])
            page.wait_for(f"{SEARCH}.activeElement.value === '{typed}' && {SEARCH}.textContent.includes('1 result')")
