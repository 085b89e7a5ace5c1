"""What CI makes of tests that fail: scripts/once_more.py."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ONCE_MORE = Path(__file__).parents[2] / "scripts" / "once_more.py"

TESTS = """\
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(2))
def test_second_time(number):
    met = Path(__file__).with_name(f"met-{number}")
    first = not met.exists()
    met.touch()
    assert not first

def test_always():
    with Path(__file__).with_name("always").open("a") as runs:
        runs.write("once")
"""


def test_what_failed_by_accident_is_named_and_fails_nothing(tmp_path: Path) -> None:
    """As `make test` has it, but with the plugin alone that is named: to import all of them takes longer than the tests."""
    (tmp_path / "test_it.py").write_text(TESTS)
    options = ["-p", "xdist", "-n", "2", "-q", "--rootdir", str(tmp_path), "-c", "/dev/null"]
    done = subprocess.run(
        [sys.executable, str(ONCE_MORE), *options, str(tmp_path / "test_it.py")],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (tmp_path / "always").read_text() == "once"
    assert done.returncode == 0
    said = done.stdout.splitlines()[-1]
    assert said.startswith("== flaky: failed once and passed alone, to be mended: ")
    assert "test_second_time[0]" in said
    assert "test_second_time[1]" in said


def decided(failed: "list[str]", *statuses: int) -> "tuple[int, list[list[str]]]":
    """Its status where these tests fail and runs of pytest end so, and the arguments of each run."""
    spec = importlib.util.spec_from_file_location("once_more", ONCE_MORE)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    runs: list[list[str]] = []

    def run(*arguments: str) -> int:
        if not runs:
            record = Path(arguments[1].removeprefix("cache_dir="), "v", "cache", "lastfailed")
            record.parent.mkdir(parents=True)
            record.write_text(json.dumps(dict.fromkeys(failed, True)))
        runs.append([*arguments])
        return statuses[len(runs) - 1]

    script.pytest = run  # type: ignore[attr-defined]
    return script.main(["tests", "--rows=full"]), runs


def test_what_fails_again_fails(capsys: pytest.CaptureFixture[str]) -> None:
    status, (_, again) = decided(["one", "two"], 1, 1)
    assert status == 1
    assert again == ["-p", "no:cacheprovider", "--rows=full", "one", "two"]
    assert "flaky" not in capsys.readouterr().out


def test_what_is_no_accident_is_not_run_again() -> None:
    for failed, status in ((["1", "2", "3", "4"], 1), ([], 1), (["one"], 2), ([], 0)):  # many; none; pytest was interrupted
        found, runs = decided(failed, status)
        assert (found, len(runs)) == (status, 1)
