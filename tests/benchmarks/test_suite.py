"""The suite goes on where it was interrupted, and its tables have the cells of all parts."""

import sys
from pathlib import Path

import pytest
import suite
from harness import Findings
from test_tables import cell_of, facts_of


def test_finished_parts_are_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def measure(comparison: suite.Comparison, *_: object) -> Findings:
        part = next(name for name, value in suite.PARTS.items() if value is comparison)
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(part)
        return Findings(facts=facts_of(cell_of("ours", "step", 16 + list(suite.PARTS).index(part), [1.0] * 5)))

    monkeypatch.setattr(suite, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["suite.py", str(tmp_path), "--parts", "^(full|low|big-low|trained)$"])
    with pytest.raises(KeyboardInterrupt):
        suite.main()
    measured[:] = []
    assert suite.main() == 0
    assert measured == ["big-low"]
    tables = (tmp_path / "benchmarks.md").read_text(encoding="utf-8")
    assert all(f"| 64 | {16 + list(suite.PARTS).index(part)} | 1 |" in tables for part in ("full", "low", "big-low"))
    assert tables in capsys.readouterr().out
