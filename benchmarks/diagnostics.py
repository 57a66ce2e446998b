"""The fraction of the steps' time that diagnostics took, from the metrics of finished runs.

python benchmarks/diagnostics.py runs/A [runs/B ...]
"""

import argparse
import json
from pathlib import Path
from statistics import median

from harness import table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    runs = parser.parse_args().runs
    rows = []
    for path in runs:
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text("utf-8").splitlines()]
        steps = [r for r in records if "seconds" in r]
        seconds = [r["seconds"] for r in steps]
        plain = median(r["seconds"]["diagnostics"] / r["seconds"]["total"] for r in steps if "held_out_check" not in r)
        everything = sum(s["diagnostics"] for s in seconds) / sum(s["total"] for s in seconds)
        rows.append((path.name, len(steps), f"{plain:.2%}", f"{everything:.2%}"))
    columns = ("run", "steps", "diagnostics without held-out check, median", "all diagnostics, fraction of all time")
    print(table(columns, rows))


if __name__ == "__main__":
    main()
