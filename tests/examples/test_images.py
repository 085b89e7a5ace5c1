"""examples/images.py as a program: what it prints and saves, and the ways it ends."""

import argparse
import importlib
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("numpy")
pytest.importorskip("PIL")

import numpy as np
from PIL import Image

import percore
import percore.testing

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "images.py"
COMMAND = [sys.executable, str(EXAMPLE), "--workers", "2", "--size", "640x480"]
TIMEOUT = 45.0
WIDTH, HEIGHT = 320, 240


@contextmanager
def started(folder: Path, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """The program; its photographs are in `folder`."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    pipe = subprocess.PIPE
    command = [*COMMAND, *map(str, arguments)]
    program = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True)
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "photographs"
    folder.mkdir()
    return folder


def seconds_in(printed: str) -> tuple[float, float]:
    (line,) = re.findall(r"^  seconds +([\d.]+) +([\d.]+)$", printed, re.MULTILINE)
    return float(line[0]), float(line[1])


def is_black(sheet: Image.Image, number: int) -> bool:
    """Whether this cell of a sheet with three pictures in a row has nothing in it."""
    row, column = divmod(number, 3)
    cell = np.asarray(sheet)[row * HEIGHT : (row + 1) * HEIGHT, column * WIDTH : (column + 1) * WIDTH]
    return not cell.any()


def test_it_tells_and_saves_what_it_has_developed(folder: Path, tmp_path: Path) -> None:
    saved = tmp_path / "sheet.png"
    with started(folder, "8", "--output", saved) as program:
        printed, complaints = program.communicate(timeout=TIMEOUT)
    assert (program.returncode, complaints) == (0, "")
    shares = [float(share) for share in re.findall(r"^  \d+ to \d+ +([\d.]+)%", printed, re.MULTILINE)]
    assert len(shares) == 8
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert re.search(r"^  pictures +8 +8$", printed, re.MULTILINE)
    parallel, single = seconds_in(printed)
    assert min(parallel, single) > 0
    assert re.search(r"^percore: \d+\.\d\d times the pictures/s of one process, with 2 workers$", printed, re.MULTILINE)
    with Image.open(saved) as sheet:
        assert sheet.size == (3 * WIDTH, 3 * HEIGHT)
        assert [is_black(sheet, number) for number in range(9)] == [False] * 8 + [True]
    assert list(folder.iterdir()) == []


@pytest.mark.asyncio_only  # the loop under test is the program's
def test_workers_that_die_cost_no_picture(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One when it has made a photograph, and one when it has developed one by the shared table."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    images = importlib.import_module("images")

    class LosingRunner(percore.testing.FakeRunner):
        async def start(self) -> None:
            await super().start()
            self.losses = ExitStack()
            for stage in (images.make_photograph, images.develop_shared):
                self.losses.enter_context(percore.testing.losing(self, stage, times=1))

        async def aclose(self, *, grace: float | None = None) -> None:
            self.losses.close()
            await super().aclose(grace=grace)

    monkeypatch.setattr(percore, "Runner", LosingRunner)
    options = argparse.Namespace(count=6, size=(640, 480), workers=2, output=None)
    assert images.compare(folder, options) == 0, "the pictures are those of one process"
    assert caplog.text.count("died by SIGKILL") == 2
    assert re.search(r"^  pictures +6 +6$", capsys.readouterr().out, re.MULTILINE)


def test_ctrl_c_leaves_nothing(folder: Path) -> None:
    with started(folder, "5000") as program:
        assert program.stdout is not None
        assert program.stdout.readline()
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does it: to every process of the group
        printed, complaints = program.communicate(timeout=TIMEOUT)
    assert (program.returncode, printed, complaints) == (130, "", "")
    assert list(folder.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(program.pid, 0)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["0"], "argument COUNT: invalid whole value: '0'"),
        (["--size", "640"], "argument --size: invalid size value: '640'"),
        (["--size", "0x480"], "argument --size: invalid size value: '0x480'"),
        (["--workers", "none"], "argument --workers"),
    ],
)
def test_a_bad_command_line_gets_a_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_what_cannot_be_saved_gets_a_sentence(folder: Path) -> None:
    with started(folder, "1", "--output", "/nonexistent/sheet.png") as program:
        _, complaints = program.communicate(timeout=TIMEOUT)
    assert program.returncode == 1
    assert "cannot save /nonexistent/sheet.png: " in complaints
    assert "Traceback" not in complaints
    assert list(folder.iterdir()) == []


def test_a_format_that_nobody_knows_gets_a_sentence(tmp_path: Path) -> None:
    example = runpy.run_path(str(EXAMPLE))
    with pytest.raises(SystemExit) as ended:
        example["save"](example["Sheet"](1), tmp_path / "sheet.words")
    assert str(ended.value.code).startswith(f"cannot save {tmp_path}/sheet.words: ")
