"""Gathers the hits of all sweeps, also of other processes that pytest runs them in, for the table at the end."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.sweep.judge")

HITS: Counter[tuple[str, str, str, str]] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call":
        for name, value in report.user_properties:
            if name == "hit":
                HITS[tuple(json.loads(str(value)))] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from tests.sweep import table

    if HITS:
        text = table.render(HITS)
        terminalreporter.write_sep("=", "hits, by place and state")
        terminalreporter.write(text)
        if path := os.environ.get("SWEEP_TABLE"):
            Path(path).write_text(text)
