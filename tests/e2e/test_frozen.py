"""Programs whose sys.executable is no interpreter: frozen ones, and hosts that embed Python. None starts itself again and again."""

import os
import pkgutil
import re
import runpy
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import percore
from percore._common.system import default_start_method
from tests.e2e import frozen_program
from tests.e2e.scripts import Done, execute, output_of
from tests.rows import repeats

HOOKS = Path(percore.__file__).parent / "_pyinstaller"
METHODS = ["forkserver", "spawn"] if default_start_method() == "forkserver" else ["spawn"]
FROZEN = [METHODS[0], *repeats(*METHODS[1:])]


# What a frozen program begins with, before any code of its own. PyInstaller's run-time hook sets `freeze_support` in the same way.
FREEZER = """\
#!{interpreter}
import sys

sys.frozen, sys.executable = True, __file__

import multiprocessing.spawn

multiprocessing.freeze_support = multiprocessing.spawn.freeze_support
"""


def frozen_by_hand(source: str, folder: Path) -> Path:
    """A script that looks like a frozen program to percore: the executable is the program itself."""
    program = folder / "frozen_program"
    program.write_text(FREEZER.format(interpreter=sys.executable) + source)
    program.chmod(0o755)
    return program


def frozen_by_pyinstaller(source: str, folder: Path) -> Path:
    """The frozen program. To make it takes some ten seconds."""
    pytest.importorskip("PyInstaller")
    (folder / "frozen_program.py").write_text(source)
    done = execute(
        [
            sys.executable,
            "-m",
            "PyInstaller",
            "--log-level=WARN",
            f"--paths={HOOKS.parents[1]}",
            f"--additional-hooks-dir={HOOKS}",
            folder / "frozen_program.py",
        ],
        cwd=folder,
        environment={"PYINSTALLER_CONFIG_DIR": folder / "cache"},
    )
    assert done.code == 0, done.err
    return folder / "dist" / "frozen_program" / "frozen_program"


# To build takes more CPU than the rest of this file. What percore does in a frozen program, the other one shows; what PyInstaller
# packs, the test of the hook.
@pytest.fixture(scope="module", params=[frozen_by_hand, *repeats(frozen_by_pyinstaller)], ids=["by hand", "by PyInstaller"])
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = request.param(Path(frozen_program.__file__).read_text(), tmp_path_factory.mktemp("frozen"))
    return made


def run(program: Path, folder: Path, *arguments: str, **environment: str) -> tuple[Done, int]:
    """How it ends, and how often it was started."""
    starts = folder / "starts"
    done = execute([program, *arguments], cwd=folder, environment={"STARTS": starts, **environment})
    return done, len(starts.read_text().splitlines())


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", FROZEN)
def test_a_frozen_program_has_workers(method: str, program: Path, tmp_path: Path) -> None:
    done, starts = run(program, tmp_path, method)
    assert (done.code, done.out, done.err) == (0, "[0, 2, 4] [0, 3, 6] [9]\n8\n", "")
    assert starts < 10  # itself, and a helper each; nothing multiplies


@pytest.mark.timeout(120)
@pytest.mark.parametrize("method", FROZEN)
def test_a_frozen_program_without_freeze_support_is_refused_and_told(method: str, program: Path, tmp_path: Path) -> None:
    done, starts = run(program, tmp_path, method, NO_SUPPORT="1")
    assert done.code != 0
    assert starts <= 4  # itself, a fork server that is started early, and may die before the first request, and two that are asked
    last = re.findall(r"^percore\.StartupFailed: .*", done.err, re.MULTILINE)
    assert len(last) == 1
    assert "multiprocessing.freeze_support()" in last[0]


def test_pyinstaller_finds_the_hook_which_names_every_module() -> None:
    pytest.importorskip("PyInstaller")
    (entry,) = (one for one in entry_points(group="pyinstaller40") if one.value.startswith("percore."))
    (folder,) = entry.load()()
    modules = {one.name for one in pkgutil.walk_packages(percore.__path__, "percore.")}
    packed = {name for name in modules if not name.startswith("percore._pyinstaller")}
    assert set(runpy.run_path(f"{folder}/hook-percore.py")["hiddenimports"]) == {"percore", *packed}


HOST = """\
import asyncio, sys
import percore
from percore import Runner

sys.executable = sys.argv[1] or None
for make in (lambda: Runner(1), lambda: Runner(1, start_method="spawn")):
    try:
        asyncio.run(make().start())
    except RuntimeError as error:
        print(error)
print(percore.LoopPoolExecutor(1).submit(abs, 1).exception())
"""


@pytest.mark.parametrize("host", ["uwsgi", ""])
def test_a_host_that_is_no_interpreter_is_never_started(host: str, tmp_path: Path) -> None:
    executable = tmp_path / host if host else None
    if executable is not None:
        executable.write_text(f"#!/bin/sh\necho started >> {tmp_path}/started\n")
        executable.chmod(0o755)
    said = output_of(HOST, tmp_path, str(executable or "")).splitlines()
    assert len(said) == 3
    assert all("multiprocessing.set_executable" in line and repr(executable and str(executable)) in line for line in said)
    assert not (tmp_path / "started").exists()


GIVEN = """\
import asyncio, multiprocessing, sys
import percore

async def main():
    for method in sys.argv[2:]:
        async with percore.Runner(1, start_method=method) as runner:
            print(await runner.run(abs, -1))

multiprocessing.set_executable(sys.executable)
sys.executable = sys.argv[1]
asyncio.run(main())
"""


def test_a_host_may_name_its_interpreter(tmp_path: Path) -> None:
    assert output_of(GIVEN, tmp_path, str(tmp_path / "uwsgi"), *METHODS) == "1\n" * len(METHODS)


@pytest.mark.parametrize("name", ["python", "python3.13t", "python3-dbg", "python3.11d", "pypy3"])
def test_names_of_interpreters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from percore._engines.processes.launch import interpreter

    monkeypatch.setattr(sys, "executable", f"/opt/some where/{name}")
    monkeypatch.delitem(sys.modules, "multiprocessing.spawn", raising=False)
    assert interpreter() == f"/opt/some where/{name}"


def test_a_link_of_another_name_to_an_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from percore._engines.processes.launch import interpreter

    link = tmp_path / "service"
    os.symlink(os.path.realpath(sys.executable), link)
    monkeypatch.setattr(sys, "executable", str(link))
    monkeypatch.delitem(sys.modules, "multiprocessing.spawn", raising=False)
    assert interpreter() == str(link)
