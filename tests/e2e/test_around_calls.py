"""What surrounds a call in its worker: its process, its streams, its end; and what of it nobody should notice."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import percore
from percore._common.options import StartMethod
from percore._engines.processes.engine import ProcessEngine
from percore._protocol.interfaces import Exit
from tests.e2e import scripts
from tests.e2e.scripts import TIMEOUT, python
from tests.e2e.stories import METHODS, Story, Told, tell

pytestmark = pytest.mark.warm_fork_server

PATIENCE = 15.0  # seconds until an event that should come at once is given up
both_methods = pytest.mark.parametrize("method", METHODS)


def program(body: str, definitions: str = "", options: str = "2") -> str:
    """A guarded script: `body` runs inside `async with percore.Runner(options) as runner`."""
    indented = "\n".join(f"        {line}" for line in body.strip().splitlines())
    return f"""\
import asyncio
import contextlib
import os
import sys
import percore
{definitions}
async def main():
    async with percore.Runner({options}) as runner:
{indented}

if __name__ == "__main__":
    asyncio.run(main())
"""


PARENTS_HALF = (
    "percore._calls",
    "percore._common.options",
    "percore._common.worker_errors",
    "percore._engines",
    "percore._executor",
    "percore._map",
    "percore._monitor",
    "percore._runner",
    "percore._scheduler",
    "percore._supervisor",
    "multiprocessing",
    "psutil",
    "concurrent.futures.process",
)


# Stories of one program


STORIES = {
    "tasks left behind": Story(
        "await runner.run(start)\nprint(await runner.run(wake))",
        """
left = []

@contextlib.asynccontextmanager
async def session():
    yield "session"
    print("lifespan left")

async def linger(ticks):
    try:
        await ticks.get()
        print("ran on")
        await ticks.get()
    finally:
        await asyncio.sleep(0)
        print("cancelled with", percore.state())

async def start():
    ticks = asyncio.Queue()
    left.append((ticks, asyncio.create_task(linger(ticks))))

async def wake():
    left[0][0].put_nowait(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return len(left)
""",
        "1, lifespan=session",
    ),
    "errors of tasks": Story(
        "await runner.run(start, fail_when_cancelled)\nawait runner.run(start, fail_at_once)\nprint(await runner.run(abs, -1))",
        """
tasks = []

async def fail_when_cancelled():
    try:
        await asyncio.Event().wait()
    finally:
        raise LookupError("lost on the way out")

async def fail_at_once():
    raise LookupError("lost at once")

async def start(fn):
    task = asyncio.create_task(fn())
    if fn is fail_when_cancelled:
        tasks.append(task)
    await asyncio.sleep(0)
""",
        "1",
    ),
    "a thread left behind": Story(
        "print(await runner.run(start))",
        """
import threading

def start():
    threading.Thread(target=threading.Event().wait).start()
    return threading.active_count() > 1
""",
    ),
    "at exit": Story(
        "await runner.run(register)",
        """
import atexit

@contextlib.contextmanager
def session():
    yield
    print("lifespan left")

def register():
    atexit.register(print, "at exit", flush=False)
""",
        "1, lifespan=session",
        METHODS,
    ),
    "printing": Story(
        "await runner.map(say, range(200))\nawait runner.run(shout)",
        """
def say(n):
    print(f"line {n}")
    print("x" * 1023, file=sys.stderr)

def shout():
    sys.stderr.write("y" * 1_000_000)
""",
        methods=METHODS,
    ),
    "standard input": Story(
        "print(await runner.run(look))\nprint(sys.stdin.read())",
        """
def look():
    return sys.stdin.read(), os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev
""",
        methods=METHODS,
    ),
    "modules": Story(
        "print(json.dumps([await runner.run(look), await runner.run(look_in_thread)]))",
        """
import json

async def look():
    percore.state, percore.current_worker
    return sorted(sys.modules)

def look_in_thread():
    return sorted(sys.modules)
""",
        "1",
        METHODS,
    ),
    "what a program inherits": Story(
        # Two workers: each might have got what belongs to the other.
        "for close_fds in (True, False):\n    print(await runner.run(look, close_fds), await runner.run(look, close_fds))",
        """
import subprocess

# The folder's own descriptor is the last one and is gone when its name is looked up.
LOOK = '''
import os
names = [name for name in map("/proc/self/fd/{}".format, os.listdir("/proc/self/fd")) if os.path.lexists(name)]
print([os.readlink(name) for name in names if name > "/proc/self/fd/2"])
'''

def look(close_fds):
    command = [sys.executable, "-I", "-S", "-c", LOOK]
    return subprocess.run(command, close_fds=close_fds, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
""",
        methods=METHODS,
    ),
    "signals to programs": Story(
        """
signals = [signal.SIGINT, signal.SIGTERM]
print(await runner.map(start, signals), await runner.map(start_in_loop, signals))
print(await runner.run(survive) == await runner.run(os.getpid))
""",
        """
import signal
import subprocess

def start(signum):
    command = ["sh", "-c", "echo up; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.send_signal(signum)
        return process.wait()

async def start_in_loop(signum):
    process = await asyncio.create_subprocess_exec(
        "sh", "-c", "echo up; exec cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    await process.stdout.readline()
    process.send_signal(signum)
    return await process.wait()

def survive():
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
    return os.getpid()
""",
        "1",
        METHODS,
    ),
    "a lifespan and a drain": Story(
        """
old = await runner.run(end)
while await runner.run(os.getpid) == old:
    pass
print("replaced")
""",
        """
import signal

@contextlib.asynccontextmanager
async def session():
    yield
    print("left", flush=True)

def end():
    os.kill(os.getpid(), signal.SIGTERM)
    return os.getpid()
""",
        "1, lifespan=session",
    ),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    return tell(STORIES, tmp_path_factory.mktemp("stories"), given="for the supervisor")


def test_tasks_left_behind_run_on_and_are_cancelled_before_the_lifespan_ends(told: dict[str, Told]) -> None:
    out, err = told["tasks left behind"]
    lines = out.splitlines()
    lines.remove("1")  # the supervisor's own, which keeps its own time
    assert (lines, err) == (["ran on", "cancelled with session", "lifespan left"], "")


def test_errors_of_tasks_left_behind_are_logged(told: dict[str, Told]) -> None:
    out, err = told["errors of tasks"]
    assert out == "1\n"
    assert err.count("LookupError: lost on the way out") == 1
    assert err.count("LookupError: lost at once") == 1


def test_a_thread_left_behind_holds_nobody_up(told: dict[str, Told]) -> None:
    assert told["a thread left behind"] == ("True\n", "")


@both_methods
def test_atexit_handlers_of_workers_run(method: str, told: dict[str, Told]) -> None:
    assert told[f"at exit, {method}"] == ("lifespan left\nat exit\n", "")


@both_methods
def test_what_workers_print_is_flushed_whole(method: str, told: dict[str, Told]) -> None:
    out, err = told[f"printing, {method}"]
    assert sorted(out.splitlines()) == sorted(f"line {n}" for n in range(200))
    assert (err.count("x"), err.count("y"), err.count("\n")) == (200 * 1023, 1_000_000, 200)


@both_methods
def test_x7_standard_input_of_a_worker_is_the_null_device(method: str, told: dict[str, Told]) -> None:
    rest = "for the supervisor" if method == METHODS[0] else ""  # which it has read to its end by then
    assert told[f"standard input, {method}"] == (f"('', True)\n{rest}\n", "")


@both_methods
def test_a_worker_never_loads_the_parents_half(method: str, told: dict[str, Told]) -> None:
    out, err = told[f"modules, {method}"]
    assert err == ""
    for modules in json.loads(out):
        assert "percore._worker_process.main" in modules
        assert [name for name in modules if any(name == half or name.startswith(f"{half}.") for half in PARENTS_HALF)] == []


@both_methods
def test_a_program_started_in_a_worker_inherits_streams_only(method: str, told: dict[str, Told]) -> None:
    assert told[f"what a program inherits, {method}"] == ("[] []\n[] []\n", "")


@both_methods
def test_a_program_started_in_a_worker_obeys_signals(method: str, told: dict[str, Told]) -> None:
    assert told[f"signals to programs, {method}"] == ("[-2, -15] [-2, -15]\nTrue\n", "")


def test_k9_the_lifespan_is_left_by_a_worker_that_drains(told: dict[str, Told]) -> None:
    out, err = told["a lifespan and a drain"]
    assert sorted(out.splitlines()) == ["left", "left", "replaced"]
    assert err == ""


# Streams


@both_methods
def test_workers_print_to_the_standard_output_of_the_moment_they_start(method: str, tmp_path: Path) -> None:
    text = f"""\
import asyncio
import os
import sys
import percore

def redirect(path):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(fd, 1)
    os.close(fd)

async def main():
    async with percore.Runner(1, start_method={method!r}) as first:
        await first.run(print, "to the pipe")
        redirect("redirected")
        async with percore.Runner(1, start_method={method!r}) as second:
            await second.run(print, "to the file")
        await first.run(print, "to the pipe, too")
        try:
            await first.run(os._exit, 3)
        except percore.WorkerDied as error:
            assert error.exitcode == 3, error
        await first.run(print, "to the file by a replacement")

if __name__ == "__main__":
    asyncio.run(main())
"""
    (tmp_path / "program.py").write_text(text)
    done = python("program.py", cwd=tmp_path)
    assert done.code == 0, done
    # os._exit flushes nothing: what that worker had printed into a pipe is lost as in any process that ends so.
    assert done.out in ("", "to the pipe\nto the pipe, too\n")
    assert (tmp_path / "redirected").read_text() == "to the file\nto the file by a replacement\n"


# The world


@both_methods
def test_a_replacement_sees_the_world_of_its_own_start(method: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "appeared.py").write_text("VALUE = 7\n")
    definitions = """
import time

def look():
    umask = os.umask(0)
    os.umask(umask)
    try:
        from appeared import VALUE
    except ImportError:
        VALUE = None
    seen = [os.environ.get("FIRST"), os.environ.get("SECOND"), time.strftime("%Z")]
    return *seen, os.path.basename(os.getcwd()), umask, VALUE
"""
    body = """
print(await runner.run(look))
del os.environ["FIRST"]
os.environ["SECOND"] = "new"
os.environ["TZ"] = "XYZ-3"
os.umask(0o027)
sys.path.append(os.path.abspath("elsewhere"))
os.chdir("elsewhere")
print(await runner.run(look))
with contextlib.suppress(percore.WorkerDied):
    await runner.run(os._exit, 0)
print(await runner.run(look))
"""
    text = program(body, definitions, f"1, start_method={method!r}")
    (tmp_path / "program.py").write_text(text.replace("    asyncio.run", "    os.umask(0o077)\n    asyncio.run"))
    done = python("program.py", cwd=tmp_path, environment={"FIRST": "old", "TZ": "ABC-1"})
    assert done.code == 0, done
    before = ("old", None, "ABC", tmp_path.name, 0o077, None)
    after = (None, "new", "XYZ", "elsewhere", 0o027, 7)
    assert done.out.splitlines() == [repr(before), repr(before), repr(after)]
    assert re.fullmatch(r"percore: worker 0 \(pid \d+\) died with exit code 0\n", done.err)


async def test_workers_have_uvloop_by_default_and_asyncio_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = "asyncio" if "uvloop" in os.environ.get("PERCORE_WITHOUT", "") else "uvloop"
    async with percore.Runner(1) as default, percore.Runner(1, loop_factory=asyncio.new_event_loop) as plain:
        assert await default.run(scripts.loop_traits) == (expected, False)
        assert await plain.run(scripts.loop_traits) == ("asyncio", False)


@pytest.mark.parametrize("factory", [None, asyncio.new_event_loop])
async def test_the_debug_flag_of_the_loop_is_inherited(factory: Callable[[], asyncio.AbstractEventLoop] | None) -> None:
    loop = asyncio.get_running_loop()
    loop.slow_callback_duration = TIMEOUT
    loop.set_debug(True)
    try:
        async with percore.Runner(1, loop_factory=factory) as runner:
            assert (await runner.run(scripts.loop_traits))[1] is True
    finally:
        loop.set_debug(False)


# Draining


class Exits:
    """The exit codes of workers by pid, as their launcher tells them."""

    def __init__(self) -> None:
        self._codes: dict[int, asyncio.Future[int | None]] = {}

    def of(self, pid: int) -> "asyncio.Future[int | None]":
        return self._codes.setdefault(pid, asyncio.get_running_loop().create_future())

    async def code(self, pid: int) -> int | None:
        return await asyncio.wait_for(self.of(pid), PATIENCE)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Exits:
    exits = Exits()
    original = ProcessEngine.start

    def start(self: ProcessEngine, index: int, generation: int, on_exit: Callable[[Exit], None], *more: Any) -> Any:
        def told(end: Exit) -> None:
            exits.of(worker.pid or 0).set_result(end.code)
            on_exit(end)

        worker = original(self, index, generation, told, *more)
        return worker

    monkeypatch.setattr(ProcessEngine, "start", start)
    return exits


def pids_of(runner: percore.Runner) -> list[int]:
    return [worker.pid for worker in runner.statistics().workers if worker.pid is not None]


class Gate:
    """Where a call in a worker says that it has begun, and waits to be let go."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._fds = []
        for end in ("begun", "open"):
            os.mkfifo(f"{path}.{end}")
            self._fds.append(os.open(f"{path}.{end}", os.O_RDWR))  # both ends: opening waits for nobody

    async def wait_begun(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._fds[0], readable.set)
        try:
            await asyncio.wait_for(readable.wait(), PATIENCE)
        finally:
            loop.remove_reader(self._fds[0])

    def open(self) -> None:
        os.write(self._fds[1], b"the end")

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def make_gate(tmp_path: Path) -> Iterator[Callable[[], Gate]]:
    gates: list[Gate] = []

    def make() -> Gate:
        gates.append(Gate(tmp_path / f"gate-{len(gates)}"))
        return gates[-1]

    yield make
    for gate in gates:
        gate.close()


@both_methods
async def test_k9_sigterm_drains_a_worker(method: StartMethod, make_gate: Callable[[], Gate], exits: Exits) -> None:
    async with percore.Runner(1, threads=1, start_method=method) as runner:
        (old,) = pids_of(runner)
        gates = [make_gate(), make_gate()]
        running = [
            runner.submit(scripts.wait_at_gate, gates[0].path),
            runner.submit(scripts.wait_at_gate_in_task, gates[1].path),
        ]
        for gate in gates:
            await gate.wait_begun()
        queued = [runner.submit(scripts.pid) for _ in range(20)]

        os.kill(old, signal.SIGTERM)

        # The unstarted go to the replacement, while the started hold the old worker.
        new = set(await asyncio.gather(*queued))
        assert len(new) == 1
        assert old not in new
        assert not any(call.done() for call in running)
        assert not exits.of(old).done()
        assert await runner.run(scripts.pid_of_task) in new
        for gate in gates:
            gate.open()
        assert await asyncio.gather(*running) == [(old, "the end")] * 2
        assert await exits.code(old) == 0
        statistics = runner.statistics()
        assert (statistics.restarts, statistics.failed, statistics.done) == (1, 0, 23)
    (pid,) = new
    assert await exits.code(pid) == 0


@pytest.mark.parametrize(
    ("job", "probe"), [(scripts.wait_at_gate, scripts.pid), (scripts.wait_at_gate_in_task, scripts.pid_of_task)]
)
async def test_k9_a_worker_that_drains_ends_with_its_last_call(
    job: Callable[[str], Any], probe: Callable[[], Any], make_gate: Callable[[], Gate], exits: Exits
) -> None:
    async with percore.Runner(1, threads=1, concurrency=1) as runner:
        for _ in range(3):
            (old,) = pids_of(runner)
            gate = make_gate()
            call = runner.submit(job, gate.path)
            await gate.wait_begun()
            os.kill(old, signal.SIGTERM)
            # The old one has no place for it: the answer tells that its replacement is there.
            assert await runner.run(probe) != old
            gate.open()
            assert await call == (old, "the end")
            assert await exits.code(old) == 0


async def test_k9_an_idle_worker_ends_by_sigterm_and_a_second_one_changes_nothing(exits: Exits) -> None:
    async with percore.Runner(1) as runner:
        (old,) = pids_of(runner)
        process = psutil.Process(old)
        process.terminate()
        with suppress(psutil.NoSuchProcess):
            process.terminate()
        assert await exits.code(old) == 0
        assert await runner.run(scripts.pid) != old


async def test_k9_nothing_fails_while_workers_drain_under_load(exits: Exits) -> None:
    async with percore.Runner(2) as runner:
        plain = runner.map(scripts.double, range(4000), window=200)
        tasks = runner.map(scripts.double_in_task, range(4000), window=200)
        work = asyncio.gather(plain.collect(), tasks.collect())
        drained = []
        for _ in range(6):
            # A worker that answers is ready, so the signal finds its handler in place.
            pid = await runner.run(scripts.pid)
            if pid not in drained:
                os.kill(pid, signal.SIGTERM)
                drained.append(pid)
        for results in await work:
            assert results == [2 * n for n in range(4000)]
        assert [await exits.code(pid) for pid in drained] == [0] * len(drained)
        assert runner.statistics().failed == 0


@pytest.mark.skipif("pidfd" in os.environ.get("PERCORE_WITHOUT", ""), reason="no fork server")
async def test_sigterm_to_the_fork_server_does_nothing(exits: Exits) -> None:
    async with percore.Runner(1, start_method="forkserver") as runner:
        (old,) = pids_of(runner)
        server = psutil.Process(old).parent()
        assert server is not None
        assert server.ppid() == os.getpid()
        for signum in (signal.SIGTERM, signal.SIGINT):
            server.send_signal(signum)
        assert await runner.run(scripts.pid) == old
        psutil.Process(old).terminate()
        assert await exits.code(old) == 0
        new = await runner.run(scripts.pid)
        assert psutil.Process(new).ppid() == server.pid


# Coverage


def test_coverage_sees_what_runs_in_workers(tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    (tmp_path / ".coveragerc").write_text("[run]\nparallel = true\npatch = subprocess\nsource = .\n")
    work = """\
import asyncio

def plain(n):
    twice = 2 * n
    return twice

async def task(n):
    await asyncio.sleep(0)
    thrice = 3 * n
    return thrice

def never():
    return None
"""
    (tmp_path / "program.py").write_text(
        """\
import asyncio
import importlib
import percore

def mine():
    one = 1
    return one

def mine_too():
    two = 2
    return two

async def main():
    for method, function in [("forkserver", mine), ("spawn", mine_too)]:
        async with percore.Runner(2, start_method=method) as runner:
            work = importlib.import_module(f"in_{method}")
            await runner.map(work.plain, range(9))
            await runner.map(work.task, range(9))
            await runner.run(function)

if __name__ == "__main__":
    asyncio.run(main())
"""
    )
    for method in METHODS:
        (tmp_path / f"in_{method}.py").write_text(work)
    for arguments in (["run", "program.py"], ["combine", "-q"], ["json", "-q", "-o", "told.json"]):
        done = python("-m", "coverage", *arguments, cwd=tmp_path)
        assert (done.code, done.out, done.err) == (0, "", "")
    files = json.loads((tmp_path / "told.json").read_text())["files"]
    missing = {name: file["missing_lines"] for name, file in files.items()}
    assert missing == {"program.py": [], "in_forkserver.py": [13], "in_spawn.py": [13]}
