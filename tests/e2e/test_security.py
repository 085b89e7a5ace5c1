"""What other processes, files and logs can see of a runner: nothing that the user has not asked to show.

`tests/unit/test_fault_ids.py` has the ids V1 to V13. SECURITY.md says what is promised.
"""

import asyncio
import contextlib
import logging
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

import percore
from tests.e2e import security_jobs as jobs
from tests.faults import LIMIT

pytestmark = [
    pytest.mark.asyncio_only,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it looks into /proc"),
]

SECRET = "canary-5f1c"
OURS = ("memfd", "eventfd", "pidfd")
METHODS = pytest.mark.parametrize("method", ["forkserver", "spawn"])


def processes() -> list[psutil.Process]:
    """This process and its descendants."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def targets(pid: int) -> list[str]:
    """What the descriptors of a process are."""
    found = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def lines(table: str) -> list[list[str]]:
    """The rows of a table of sockets."""
    try:
        return [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    except FileNotFoundError:
        return []


def names(folder: str) -> set[str]:
    """What lies in a folder."""
    with contextlib.suppress(FileNotFoundError):
        return set(os.listdir(folder))
    return set()


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def mappings(pid: int) -> list[tuple[str, set[str]]]:
    """The mappings of a process: what is mapped, and the kernel's flags."""
    found, name = [], ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = line[73:]
        elif line.startswith("VmFlags:"):
            found.append((name, set(line.split()[1:])))
    return found


@METHODS
async def test_nothing_of_a_runner_has_a_name_listens_or_shows_arguments(
    method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "percore")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    sockets_before = set(targets(os.getpid()))
    async with percore.Runner(2, start_method=method, loop_factory=asyncio.SelectorEventLoop) as runner:  # uvloop has an eventfd
        large = await runner.run(jobs.echo, SECRET.encode() * 100_000)
        assert large == SECRET.encode() * 100_000
        with pytest.raises(ValueError, match="characters") as failed:
            await runner.run(jobs.fail, SECRET)
        with pytest.raises(percore.WorkerDied) as died:
            await runner.run(jobs.end, SECRET)
        assert await runner.map(jobs.echo, range(20)) == list(range(20))
        everybody = processes()

        # V1: no socket listens, is bound to a name, or is connected to anything but its pair.
        inodes = {
            target.removeprefix("socket:[").removesuffix("]")
            for process in everybody
            for target in targets(process.pid)
            if target.startswith("socket:") and target not in sockets_before
        }
        for table, column in {"tcp": 9, "tcp6": 9, "udp": 9, "udp6": 9, "netlink": 9}.items():
            assert not {row[column] for row in lines(table) if len(row) > column} & inodes, table
        pairs = [row for row in lines("unix") if row[6] in inodes]
        assert all(len(row) == 7 for row in pairs), "a unix socket has a name"
        assert {row[5] for row in pairs} <= {"03"}, "a unix socket is not connected"

        # V2: no file in the working folder and the one for temporary files, and none of percore's in that for shared memory.
        assert not os.listdir(tmp_path)
        assert not [name for name in names("/dev/shm") if "percore" in name]
        # V6: nothing of a call in arguments and environment of the processes. V7: nothing of it in a core dump.
        for process in everybody[1:]:
            assert SECRET not in " ".join(process.cmdline())
            assert SECRET.encode() not in environment(process.pid)
        for process in everybody:
            shared = [flags for name, flags in mappings(process.pid) if "memfd:percore" in name]
            assert all("dd" in flags for flags in shared), "a core dump would have the memory of calls in it"
        assert any("memfd:percore" in name for name, _ in mappings(os.getpid()))

        # V4: nobody whom a call starts gets a descriptor of percore's.
        for way in (jobs.fds_of_a_child, jobs.fds_of_a_fork):
            found = await runner.run(way)
            assert not [kind for kind in OURS if kind in found], found

        # V12: no argument in errors, statistics and logs.
        shown = [str(died.value), str(failed.value.__cause__), repr(runner), str(runner.statistics()), caplog.text]
        assert not [text for text in shown if SECRET in text]


HOSTILE = ("pickle", "asyncio", "percore", "mmap", "multiprocessing", "socket", "uvloop")


@METHODS
def test_no_module_comes_from_the_working_directory(method: str, tmp_path: Path) -> None:
    """V5: the script lies elsewhere, and so the program itself imports nothing from there."""
    hostile, program = tmp_path / "hostile", tmp_path / "program"
    hostile.mkdir()
    program.mkdir()
    for name in HOSTILE:
        (hostile / f"{name}.py").write_text("import os; os._exit(66)")
    (hostile / "startup.py").write_text("import os; os._exit(67)")
    (program / "script.py").write_text(
        textwrap.dedent(f"""
            import asyncio, sys
            import percore
            from tests.e2e import security_jobs as jobs

            async def main():
                async with percore.Runner(1, start_method={method!r}) as runner:
                    print(await runner.run(jobs.modules_from, {str(hostile)!r}))

            if __name__ == "__main__":
                asyncio.run(main())
        """)
    )
    done = subprocess.run(
        [sys.executable, str(program / "script.py")],
        cwd=hostile,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSTARTUP": str(hostile / "startup.py")},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)


def test_v11_without_ctypes_buffers_are_copied_and_hardening_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['_ctypes'] = sys.modules['ctypes'] = None")
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
            import asyncio
            import numpy, percore
            from tests import jobs
            from tests.contract import share_jobs

            async def main():
                array = numpy.arange(100_000)
                async with percore.Runner(1) as runner:
                    back = await runner.run(jobs.echo, array)
                    shared = await runner.share(array)
                    there = await runner.run(share_jobs.value_of, shared)
                    print((back == array).all(), back.flags.writeable, there.sum() == array.sum())
                try:
                    percore.Runner(harden=True)
                except ValueError as error:
                    print(error)

            if __name__ == "__main__":
                asyncio.run(main())
        """)
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("True True True\nharden=True needs Linux, and a Python that has ctypes\n", "")


async def test_a_fork_of_the_program_holds_no_bells_and_processes() -> None:
    """V4: it could ring for the program, and keep the workers alive. (The memory it keeps: views of it must stay valid there.)"""
    async with percore.Runner(1) as runner:
        assert await runner.run(abs, -1) == 1
        found = await asyncio.to_thread(jobs.fds_of_a_fork)
        assert "eventfd" not in found
        assert "pidfd" not in found


def test_v13_the_package_has_no_native_code_and_opens_no_connection_when_it_is_imported() -> None:
    package = Path(percore.__file__).parent
    assert not [path for path in package.rglob("*") if path.suffix in {".so", ".pyd", ".dll", ".dylib", ".a", ".o"}]
    program = textwrap.dedent("""
        import sys

        def refuse(event, args):
            assert event not in {"socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname"}, (event, args)

        sys.addaudithook(refuse)
        import percore
        for name in percore.__all__:
            try:
                getattr(percore, name)
            except ImportError:  # of what is not installed
                pass
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
