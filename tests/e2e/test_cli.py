"""The command line: `python -m percore`, and the script `percore`."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import percore
from percore._cli import rows
from tests.counts import times
from tests.e2e.executors import end_helpers

COMMAND = [sys.executable, "-m", "percore"]


def run(*arguments: str, command: list[str] = COMMAND, limit: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    whole = [*command, *arguments]
    if limit:
        whole = ["sh", "-c", f'{limit}; exec "$@"', "sh", *whole]
    return subprocess.run(whole, env=os.environ | variables, capture_output=True, text=True, check=False)


def test_doctor_says_what_works_here() -> None:
    done = run("doctor")
    assert done.stderr == ""
    assert done.returncode == 0, done.stdout
    assert "a worker started and ran a call within" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("problems: 0, notes: ")


def test_doctor_says_what_is_lacking_as_json() -> None:
    done = run("doctor", "--json", limit="ulimit -n 20", PERCORE_WITHOUT="eventfd,uvloop")
    assert done.returncode == 1
    told = {one["name"]: one for one in json.loads(done.stdout)["findings"]}
    assert told["a trial"]["level"] == told["open files"]["level"] == "problem"
    assert "raise the limit (ulimit -n)" in told["a trial"]["value"]
    assert {name: told[name]["level"] for name in ("eventfd", "uvloop", "memfd")} == {
        "eventfd": "note",
        "uvloop": "note",
        "memfd": "ok",
    }


def test_the_script_and_the_version() -> None:
    script = shutil.which("percore", path=str(Path(sys.executable).parent))
    assert script, "percore is not installed with its script: make .venv/.percore-test"
    for command in ([script], COMMAND):
        assert run("--version", command=command).stdout == f"percore {percore.__version__}\n"


def test_a_reader_that_has_enough_ends_it() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([*COMMAND, "top", "--json"], stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_without_a_command_it_says_how_to_use_it() -> None:
    done = run()
    assert done.returncode == 2
    assert "usage: percore" in done.stderr


@pytest.mark.parametrize("count", [times(2, 50)])
async def test_each_way_to_do_a_row_does_it(count: int) -> None:
    done = []
    with rows.standard_pool(1) as pool:
        async with percore.Runner(1) as runner:
            for row in rows.Pools(runner, pool, 1).rows():
                for one in row.contestants:
                    await one.work(count)
                    done.append((row.title, one.name))
    end_helpers()  # since 3.14 a ProcessPoolExecutor has a fork server
    assert len(done) == len(set(done)) == 11
