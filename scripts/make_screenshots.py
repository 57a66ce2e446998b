"""Make the pictures of docs/figures that brorl draws, from the current package.

In: the installed package and a Chromium. Out: `report.png`, the report of the recipes `quickstart` and `quickstart-16`;
`simulate.png`, the paper's simulation. It takes about four minutes.

    python scripts/make_screenshots.py [--runs FOLDER]     # FOLDER keeps the runs; those in it are not made again
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH, HEIGHT = 1280, 1700  # of the screenshot, in pixels


def brorl(*arguments: str | Path) -> None:
    """Run a command of brorl."""
    subprocess.run([sys.executable, "-m", "brorl", *arguments], check=True)


def make_all(runs: Path, browser: str) -> None:
    """Make the two pictures."""
    both = [runs / "N=512", runs / "N=16"]
    for run, recipe in zip(both, ("quickstart", "quickstart-16"), strict=True):
        if not run.exists():
            brorl("train", recipe, "--output_dir", run)
    page = runs / "report.html"
    brorl("report", *both, "--output", page)
    screenshot = f"--screenshot={FIGURES / 'report.png'}"
    options = ("--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=10000")
    subprocess.run([browser, *options, f"--window-size={WIDTH},{HEIGHT}", screenshot, page.as_uri()], check=True)
    subprocess.run([sys.executable, ROOT / "examples" / "simulator.py"], check=True, cwd=runs)
    shutil.copy(runs / "simulator.png", FIGURES / "simulate.png")


def main() -> None:
    """Read the arguments and make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, metavar="FOLDER")
    folder = parser.parse_args().runs
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        parser.error("no Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as temporary:
        make_all((folder or Path(temporary)).resolve(), browser)


if __name__ == "__main__":
    main()
