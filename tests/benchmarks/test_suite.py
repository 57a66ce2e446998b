"""The suite goes on where it was interrupted, and its tables have the cells of all parts."""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import suite
from results import Entry, Results
from test_tables import entry_of


def cells_of(part: str) -> list[Entry]:
    """Return one cell, at an N that tells the part."""
    entry = entry_of("ours", "step", 16 + list(suite.PARTS).index(part), [1.0] * 5)
    return [replace(entry, workload=replace(entry.workload, setting="full"))]


def test_complete_parts_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def measure(part: str, path: Path, args: Namespace) -> None:
        assert args.trained is None
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(part)
        path.write_text(json.dumps(Results(cells_of(part), 50.0).record() | {"complete": True}), encoding="utf-8")

    monkeypatch.setattr(suite, "_measure", measure)
    monkeypatch.setattr(sys, "argv", ["suite.py", str(tmp_path), "--parts", "full,low,big-low,trained"])
    with pytest.raises(KeyboardInterrupt):
        suite.main()
    interrupted = Results([], 0.0).record() | {"complete": False}
    (tmp_path / "big-low.json").write_text(json.dumps(interrupted), encoding="utf-8")
    measured[:] = []
    suite.main()
    assert measured == ["big-low"]
    numbers = [16 + list(suite.PARTS).index(part) for part in ("full", "low", "big-low")]
    tables = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert all(f"| 64 | {n} | 1 |" in tables for n in numbers)
    assert tables in capsys.readouterr().out


def test_every_part_is_a_call_that_peers_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import peers

    for flags in suite.PARTS.values():
        command = ["peers.py", *flags.split(), "--trained", str(tmp_path), "--vllm-python", sys.executable]
        monkeypatch.setattr(sys, "argv", command)
        args = peers._arguments()
        assert args.settings
        assert all(isinstance(n, int) for n in args.num_rollouts)
