"""What the user of a whole program sees on standard error of what its workers log."""

from pathlib import Path

import pytest

from tests.e2e.scripts import Done, python

SCRIPT = """\
import asyncio
import logging
import warnings
import percore
{configuration}
log = logging.getLogger("app")

async def work():
    log.debug("a detail")
    log.info("as planned")
    log.warning("look here")
    warnings.warn("careful")

async def main():
    async with percore.Runner(1, start_method="{method}") as runner:
        await runner.run(work)

if __name__ == "__main__":
    asyncio.run(main())
"""
both_methods = pytest.mark.parametrize("method", ["forkserver", "spawn"])


def run(folder: Path, method: str, configuration: str = "", *flags: str) -> Done:
    (folder / "program.py").write_text(SCRIPT.format(configuration=configuration, method=method))
    return python(*flags, "program.py", cwd=folder)


@both_methods
def test_without_configuration_warnings_are_seen_once(method: str, tmp_path: Path) -> None:
    done = run(tmp_path, method)
    first, second, third = done.err.splitlines()
    assert (done.code, first) == (0, "look here")
    assert second.endswith("program.py:12: UserWarning: careful")
    assert third.strip() == 'warnings.warn("careful")'


@both_methods
def test_a_script_that_configures_logging_on_import_sees_each_record_once(method: str, tmp_path: Path) -> None:
    # The worker imports the script, and so would set up a handler of its own.
    configuration = 'logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message).12s %(processName)s")'
    done = run(tmp_path, method, configuration)
    told = [line for line in done.err.splitlines() if line.startswith(("app", "py"))]
    assert done.code == 0
    assert told[:2] == ["app INFO as planned MainProcess", "app WARNING look here MainProcess"]
    assert len(told) == 3
    assert told[2].startswith("py.warnings WARNING ")


@both_methods
def test_filters_of_warnings_given_to_the_program_hold_in_workers(method: str, tmp_path: Path) -> None:
    done = run(tmp_path, method, "", "-W", "ignore")
    assert (done.code, done.err) == (0, "look here\n")
    done = run(tmp_path, method, "", "-W", "error::UserWarning")
    assert done.code == 1
    assert "UserWarning: careful" in done.err


@both_methods
def test_a_log_file_of_the_program_gets_everything_and_no_worker_opens_it(method: str, tmp_path: Path) -> None:
    configuration = (
        'if __name__ == "__main__":\n    logging.basicConfig(filename="log", format="%(worker)d %(name)s %(message).9s")'
    )
    done = run(tmp_path, method, configuration)
    assert (done.code, done.err) == (0, "")
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0] == "0 app look here"
    assert lines[1].startswith("0 py.warnings ")


OF_A_SCRIPT = """\
import asyncio
import logging
import sys
import percore

log = logging.getLogger(__name__)
below = logging.getLogger(__name__ + ".below")

async def work():
    log.debug("a detail")
    below.info("as planned")

async def main():
    async with percore.Runner(1, start_method=sys.argv[1]) as runner:
        await runner.run(work)

if __name__ == "__main__":
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(worker)d %(name)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    asyncio.run(main())
"""


@both_methods
@pytest.mark.parametrize("how", [["program.py"], ["-m", "program"]], ids=["script", "module"])
def test_a_scripts_own_logger_has_its_handlers_and_its_level(how: list[str], method: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OF_A_SCRIPT)
    done = python(*how, method, cwd=tmp_path)
    assert (done.code, done.err) == (0, "0 __main__ DEBUG a detail\n0 __main__.below INFO as planned\n")


def test_a_scripts_own_logger_by_value(tmp_path: Path) -> None:
    done = python("-", "forkserver", cwd=tmp_path, given=OF_A_SCRIPT)
    assert (done.code, done.err) == (0, "0 __main__ DEBUG a detail\n0 __main__.below INFO as planned\n")
