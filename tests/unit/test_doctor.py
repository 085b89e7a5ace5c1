"""`percore doctor`: what it makes of facts, and how it shows that. No machine is looked at here."""

import json
import tempfile
from dataclasses import replace
from math import inf
from typing import Any

import pytest

import percore
from percore._cli import facts
from percore._cli.doctor import to_json, to_text
from percore._cli.facts import Facts, Trial
from percore._cli.findings import Finding, Level, judge

GIB = 1 << 30
GOOD = Facts(
    python="CPython 3.12.1",
    is_free_threaded=False,
    system="Linux 6.8.0",
    is_linux=True,
    cpus=4,
    allowed=4,
    quota=inf,
    workers=4,
    start_method="forkserver",
    memfd=True,
    eventfd=True,
    pidfd=True,
    setsig=True,
    reuseport=True,
    uvloop="0.21.0",
    files=65_536,
    processes=None,
    address_space=None,
    file_size=None,
    room=16 * GIB,
    temporary=GIB,
    shm=GIB,
    ptrace_scope=0,
    may_trace=False,
    threads_variable=False,
    variables={},
    trial=Trial(seconds=0.25, descriptors=10, rss=20 << 20),
)


def found(name: str, **changes: Any) -> Finding:
    (finding,) = [finding for finding in judge(replace(GOOD, **changes)) if finding.name == name]
    return finding


def test_a_good_machine_needs_no_advice() -> None:
    findings = judge(GOOD)
    assert {finding.level for finding in findings} == {Level.OK}
    assert not any(finding.advice for finding in findings)
    assert len({finding.name for finding in findings}) == len(findings)


NOTES: dict[str, tuple[str, dict[str, Any], str]] = {
    "old kernel": ("system", {"start_method": "spawn"}, "needs Linux 5.3"),
    "part of a CPU": ("CPUs", {"quota": 1.5, "workers": 2}, "give whole CPUs"),
    "many CPUs outside": ("threads of libraries", {"cpus": 64, "allowed": 4}, "start 64 threads in each worker, for 4 usable CPUs"),
    "memfd": ("memfd", {"memfd": False}, "deleted temporary files (1.0 GiB are free there); on Linux"),
    "eventfd": ("eventfd", {"eventfd": False, "is_linux": False}, "through sockets, which takes a little longer; this system"),
    "pidfd": ("pidfd", {"pidfd": False}, "a thread waits for the end of each worker"),
    "setsig": ("F_SETSIG", {"setsig": False}, "unless the worker is stopped"),
    "reuseport": ("SO_REUSEPORT", {"reuseport": False}, "share one socket"),
    "uvloop": ("uvloop", {"uvloop": None}, "pip install uvloop"),
    "uvloop off": ("uvloop", {"uvloop": ""}, "asyncio's own loop"),
    "processes": ("processes", {"processes": 30}, "4 workers with all their threads need 38"),
    "address space": ("address space", {"address_space": 4 * GIB}, "ulimit -v unlimited"),
    "file size": ("file size", {"file_size": GIB}, "ulimit -f unlimited"),
    "memory": ("memory", {"room": 800 << 20}, "less than 256 MiB for each of 4 workers"),
    "ptrace": ("ptrace", {"ptrace_scope": 1}, "only root can look into workers"),
    "ptrace off": ("ptrace", {"ptrace_scope": 3}, "only nobody can look"),
    "metrics": ("PERCORE_METRICS", {"variables": {"PERCORE_METRICS": "0"}}, "calls are not measured"),
    "typo": ("PERCORE_METRIC", {"variables": {"PERCORE_METRIC": "0"}}, "knows no such variable"),
    "variable": ("PERCORE_POINTS", {"variables": {"PERCORE_POINTS": "a=kill"}}, "unset it in production"),
}


def test_what_is_lacking_gets_advice(subtests: pytest.Subtests) -> None:
    for case, (name, changes, advice) in NOTES.items():
        with subtests.test(case=case):
            finding = found(name, **changes)
            assert finding.level is Level.NOTE
            assert advice in finding.advice


def test_what_percore_cannot_do_without_is_a_problem() -> None:
    trial = found("a trial", trial=Trial(seconds=None, error="OSError: no"))
    assert (trial.level, trial.value) == (Level.PROBLEM, "OSError: no")
    files = found("open files", files=100)
    assert (files.level, files.value) == (Level.PROBLEM, "100 (ulimit -n); each worker takes 10 in the program")
    assert found("open files", files=104).level is Level.OK
    assert found("open files", files=103, trial=Trial(seconds=None)).level is Level.PROBLEM


def test_what_is_as_good() -> None:
    assert found("system", start_method="spawn", is_linux=False).level is Level.OK  # no other way there
    assert found("CPUs", quota=2.0, workers=2).level is Level.OK
    assert found("ptrace", ptrace_scope=2, may_trace=True).level is Level.OK
    assert found("ptrace", ptrace_scope=None).level is Level.OK
    assert found("open files", files=None).value == "no limit"
    assert found("memory", room=None).level is Level.OK
    for name, value in {"PERCORE_TRACEBACKS": "full", "PERCORE_METRICS": "1"}.items():
        assert found(name, variables={name: value}).level is Level.OK
    assert "there is none" in found("/dev/shm", shm=None).value
    assert found("Python", is_free_threaded=True).value == "CPython 3.12.1, free-threaded"
    assert [finding for finding in judge(replace(GOOD, cpus=64, threads_variable=True)) if "threads" in finding.name] == []


FINDINGS = [
    Finding("memfd", Level.OK, "yes"),
    Finding("open files", Level.PROBLEM, "12", "too few " * 20),
    Finding("uvloop", Level.NOTE, "not installed", "pip install uvloop"),
]


def test_no_room_for_temporary_files_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert facts._temporary() == 0


def test_as_text() -> None:
    first, *lines, last = to_text(FINDINGS).splitlines()
    assert first == f"percore {percore.__version__}"
    assert lines[0] == "ok    memfd       yes"
    assert lines[1] == "FAIL  open files  12"
    assert lines[-2:] == ["note  uvloop      not installed", "                  pip install uvloop"]
    assert max(map(len, lines)) <= 100
    assert last == "problems: 1, notes: 1"


def test_as_json() -> None:
    told = json.loads(to_json(FINDINGS))
    assert told["percore"] == percore.__version__
    assert [(one["name"], one["level"], one["advice"]) for one in told["findings"][::2]] == [
        ("memfd", "ok", None),
        ("uvloop", "note", "pip install uvloop"),
    ]
