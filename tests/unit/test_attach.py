"""How the pages and stacks of other programs are opened: their descriptors may be those of other files meanwhile."""

import os
from pathlib import Path

import pytest

from percore._attach import programs, stacks
from percore._attach.programs import ProgramGone
from percore._attach.stacks import NoStacks


def test_a_pipe_with_the_number_of_a_page_is_neither_waited_for_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. the page is found  2. its runner closes it  3. the program opens a pipe, which gets the number."""
    read_end, write_end = os.pipe()
    try:
        monkeypatch.setattr(programs, "_paths", lambda _pid, strict: [Path(f"/proc/self/fd/{read_end}")])
        os.set_blocking(read_end, False)
        with pytest.raises(ProgramGone):
            programs.read(os.getpid())
        os.write(write_end, b"for the program")
        with pytest.raises(ProgramGone):
            programs.read(os.getpid())
        assert os.read(read_end, 100) == b"for the program"
    finally:
        os.close(read_end)
        os.close(write_end)


def test_a_file_with_the_number_of_the_stacks_stays_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "data").open("w+") as file:
        file.write("of the user")
        file.flush()
        monkeypatch.setattr(stacks, "_file", lambda _pid: Path(f"/proc/self/fd/{file.fileno()}"))
        stacks.forget_stacks(os.getpid())
        with pytest.raises(NoStacks):
            stacks.stacks_of(os.getpid())
        assert (tmp_path / "data").read_text() == "of the user"
