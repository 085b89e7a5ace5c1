"""What the user of a whole program sees on standard error of what its workers log."""

from pathlib import Path

import pytest

from tests.e2e.scripts import Done, python

SCRIPT = """\
import asyncio
import logging
import sys
import warnings
import percore
{configuration}
log = logging.getLogger("app")

async def work():
    log.debug("a detail")
    log.info("as planned")
    log.warning("look here")
    warnings.warn("careful")

async def main(method):
    async with percore.Runner(1, start_method=method) as runner:
        await runner.run(work)

if __name__ == "__main__":
    for method in ("forkserver", "spawn"):
        asyncio.run(main(method))
        sys.stderr.write("\\n==\\n")
"""


def run(folder: Path, configuration: str = "", *flags: str) -> Done:
    (folder / "program.py").write_text(SCRIPT.format(configuration=configuration))
    return python(*flags, "program.py", cwd=folder)


def of_each(done: Done) -> tuple[str, str]:
    """What a program that ends well has written on standard error with each method."""
    assert done.code == 0, done
    forked, spawned, rest = done.err.split("\n==\n")
    assert rest == ""
    return forked, spawned


def test_without_configuration_warnings_are_seen_once(tmp_path: Path) -> None:
    for told in of_each(run(tmp_path)):
        first, second, third = told.splitlines()
        assert first == "look here"
        assert second.endswith("program.py:13: UserWarning: careful")
        assert third.strip() == 'warnings.warn("careful")'


def test_a_script_that_configures_logging_on_import_sees_each_record_once(tmp_path: Path) -> None:
    # The worker imports the script, and so would set up a handler of its own.
    configuration = 'logging.basicConfig(level=logging.INFO, format="%(name)s %(levelname)s %(message).12s %(processName)s")'
    for told in of_each(run(tmp_path, configuration)):
        lines = [line for line in told.splitlines() if line.startswith(("app", "py"))]
        assert lines[:2] == ["app INFO as planned MainProcess", "app WARNING look here MainProcess"]
        assert len(lines) == 3
        assert lines[2].startswith("py.warnings WARNING ")


def test_filters_of_warnings_given_to_the_program_hold_in_workers(tmp_path: Path) -> None:
    assert of_each(run(tmp_path, "", "-W", "ignore")) == ("look here\n", "look here\n")
    ending = "for method in sys.argv[1:]:\n    try:\n        asyncio.run(main(method))\n    except UserWarning as warning:\n"
    script = SCRIPT[: SCRIPT.index("if __name__")] + f"if __name__ == '__main__':\n  {ending}        print(method, warning)\n"
    (tmp_path / "program.py").write_text(script.format(configuration=""))
    done = python("-W", "error::UserWarning", "program.py", "forkserver", "spawn", cwd=tmp_path)
    assert (done.code, done.out) == (0, "forkserver careful\nspawn careful\n")


def test_a_log_file_of_the_program_gets_everything_and_no_worker_opens_it(tmp_path: Path) -> None:
    configuration = (
        'if __name__ == "__main__":\n    logging.basicConfig(filename="log", format="%(worker)d %(name)s %(message).9s")'
    )
    assert of_each(run(tmp_path, configuration)) == ("", "")
    lines = (tmp_path / "log").read_text().splitlines()
    for told in (lines[:2], lines[2:]):
        assert told[0] == "0 app look here"
        assert told[1].startswith("0 py.warnings ")


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

async def main(method):
    async with percore.Runner(1, start_method=method) as runner:
        await runner.run(work)

if __name__ == "__main__":
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(worker)d %(name)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    for method in sys.argv[1:]:
        print(method, file=sys.stderr)
        asyncio.run(main(method))
"""


@pytest.mark.parametrize("how", [["program.py"], ["-m", "program"]], ids=["script", "module"])
def test_a_scripts_own_logger_has_its_handlers_and_its_level(how: list[str], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OF_A_SCRIPT)
    done = python(*how, "forkserver", "spawn", cwd=tmp_path)
    told = "0 __main__ DEBUG a detail\n0 __main__.below INFO as planned\n"
    assert (done.code, done.err) == (0, f"forkserver\n{told}spawn\n{told}")


def test_a_scripts_own_logger_by_value(tmp_path: Path) -> None:
    done = python("-", "forkserver", cwd=tmp_path, given=OF_A_SCRIPT)
    assert (done.code, done.err) == (0, "forkserver\n0 __main__ DEBUG a detail\n0 __main__.below INFO as planned\n")
