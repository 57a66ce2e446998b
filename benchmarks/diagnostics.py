"""The fraction of the steps' time that diagnostics took, from the metrics of finished runs.

python benchmarks/diagnostics.py runs/A [runs/B ...]
"""

import argparse
import json
from pathlib import Path
from statistics import median


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs")
    runs = parser.parse_args().runs
    print("| run | steps | diagnostics without held-out check, median share | all diagnostics, fraction of all time |")
    print("| --- | --- | --- | --- |")
    for path in runs:
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text("utf-8").splitlines()]
        steps = [r for r in records if "seconds" in r]
        seconds = [r["seconds"] for r in steps]
        plain = median(r["seconds"]["diagnostics"] / r["seconds"]["total"] for r in steps if "held_out_check" not in r)
        everything = sum(s["diagnostics"] for s in seconds) / sum(s["total"] for s in seconds)
        print(f"| {path.name} | {len(steps)} | {plain:.2%} | {everything:.2%} |")


if __name__ == "__main__":
    main()
