"""The title of a process, in a process of its own: it is written over the arguments, or the short name takes its place."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from percore._worker_process.title import program_name

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="only Linux shows titles")

PROGRAM = """
import json, os, sys
from percore._worker_process import title

def shown():
    with open("/proc/self/cmdline", "rb") as line, open("/proc/self/comm") as name:
        return [line.read().decode(), name.read().strip()]

told = [shown()]
title.set_title("worker 0", "crawl.py", "percore-w0")
told.append(shown())
title.set_title("worker 10", "", "percore-w10")
told.append(shown())
title.set_title("worker 1", "x" * 10_000, "percore-w1")
told.append(shown())
real = title._arguments
first, end = real()
for stat in (b"", b"7 (a) b) R 1 7", b"7 (python3) R " + b"0 " * 44, b"7 (python3) R " + b"x " * 60):  # a sandbox of its own mind
    title._arguments = lambda: title._arguments_in(stat)
    title.set_title("worker 3", "crawl.py", f"percore-{len(stat)}-and-more")
    told.append(shown()[1])
for wrong in ((first, first + 8), (8, 4096), (0, 0)):  # too little room; memory that is not there; a sandbox tells nothing
    title._arguments = lambda: wrong
    title.set_title("worker 2", "crawl.py", f"percore-{wrong[1] % 10}-and-more")
    told.append(shown()[1])
assert os.environ["MARK"] == "still here" and sys.orig_argv[-1] == "last"
print(json.dumps(told))
"""


def run(*, path: Path | None = None) -> list[Any]:
    environment = os.environ | {"MARK": "still here"} | ({} if path is None else {"PYTHONPATH": str(path)})
    command = [sys.executable, "-c", PROGRAM, "last"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=30)
    told: list[Any] = json.loads(done.stdout)
    return told


def test_the_title_takes_the_place_of_the_arguments() -> None:
    before, first, second, long, *told = run()
    assert told[:4] == ["percore-0-and-m", "percore-14-and-", "percore-102-and", "percore-134-and"]
    short = told[4:]
    assert before[0].endswith("last\0")
    assert first == ["percore: worker 0 of crawl.py\0", before[1]]
    assert second == ["percore: worker 10\0", before[1]]
    assert len(long[0]) == len(before[0]) - 1
    assert long[0].startswith("percore: worker 1 of xxx")
    assert long[0].endswith("x\0")
    assert short[0].startswith("percore-")
    assert [name[9:] for name in short] == ["-and-m"] * 3  # the kernel keeps 15 bytes
    assert short[1:] == ["percore-6-and-m", "percore-0-and-m"]


def test_setproctitle_writes_the_title_where_it_is_installed(tmp_path: Path) -> None:
    (tmp_path / "setproctitle.py").write_text("def setproctitle(title):\n    open('/proc/self/comm', 'w').write(title[9:])\n")
    before, first, second, *_ = run(path=tmp_path)
    assert first == [before[0], "worker 0 of cra"]
    assert second == [before[0], "worker 10"]


def test_a_program_is_named_by_its_script_or_package(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"/a/crawl.py": "crawl.py", "/lib/pytest/__main__.py": "pytest", "-c": "", "": "", "-m": "", "app": "app"}
    for path, name in names.items():
        monkeypatch.setattr(sys, "argv", [path, "argument"])
        assert program_name() == name
    monkeypatch.setattr(sys, "argv", [])
    assert program_name() == ""
