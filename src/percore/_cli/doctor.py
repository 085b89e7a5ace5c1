"""`percore doctor`: says what this machine gives to percore."""

import json
import textwrap
from typing import Final

import percore
from percore._cli.facts import read_facts
from percore._cli.findings import Finding, Level, judge

_MARKS: Final = {Level.OK: "ok  ", Level.NOTE: "note", Level.PROBLEM: "FAIL"}
_WIDTH: Final = 100


def doctor(*, as_json: bool) -> int:
    """Write the findings to standard output. Return the exit status: 1 if there is a problem."""
    findings = judge(read_facts())
    print(to_json(findings) if as_json else to_text(findings))
    return int(any(finding.level is Level.PROBLEM for finding in findings))


def to_json(findings: list[Finding]) -> str:
    """Return the findings as JSON."""
    listed = [{"name": one.name, "level": one.level.value, "value": one.value, "advice": one.advice or None} for one in findings]
    return json.dumps({"percore": percore.__version__, "findings": listed}, indent=2)


def to_text(findings: list[Finding]) -> str:
    """Return the findings as text, each with its advice below it."""
    width = max(len(finding.name) for finding in findings)
    lines = [f"percore {percore.__version__}"]
    for finding in findings:
        lines.append(f"{_MARKS[finding.level]}  {finding.name.ljust(width)}  {finding.value}")
        indent = " " * (len("note") + width + 4)
        lines += textwrap.wrap(finding.advice, _WIDTH, initial_indent=indent, subsequent_indent=indent)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    lines.append(f"problems: {counts[Level.PROBLEM]}, notes: {counts[Level.NOTE]}")
    return "\n".join(lines)
