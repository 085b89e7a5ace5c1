"""Each test runs one program of the package index with percore in it, as its users would.

`make test-programs` names this file, so `make test` does not find it: it needs what the extra `programs` installs.
"""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.scripts import TIMEOUT, execute, output_of, python

# Servers. Each gets a socket that listens already, so that a request waits until the server takes it.


@contextmanager
def _served(folder: Path, *command: str, **environment: str) -> Iterator[str]:
    """Run a server on the socket `{fd}` of its command, and yield the URL. It must end well by SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-m", *(part.format(fd=fd) for part in command)],
            cwd=folder,
            env={**os.environ, **environment},
            pass_fds=[fd],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            process.send_signal(signal.SIGTERM)
            told, _ = process.communicate(timeout=TIMEOUT)
    assert "Traceback" not in told, told


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
        return str(response.read().decode())


_WSGI = """
import multiprocessing
import percore

executor = percore.LoopPoolExecutor(2)
if multiprocessing.parent_process() is None:
    executor.submit(abs, -1).result()  # before gunicorn forks

def square(number):
    return number * number

def app(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(sum(executor.map(square, range(5)))).encode()]
"""


def test_gunicorn_preloads_an_executor_that_was_used(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(_WSGI)
    with _served(tmp_path, "gunicorn", "--preload", "--workers=2", "--bind=fd://{fd}", "service:app") as url:
        assert {_get(url) for _ in range(4)} == {"30"}


_ASGI = """
import contextlib
import fastapi
import percore

def square(number):
    return number * number

@contextlib.asynccontextmanager
async def lifespan(app):
    async with percore.Runner(2) as app.state.runner:
        yield

app = fastapi.FastAPI(lifespan=lifespan)

@app.get("/")
async def total() -> int:
    return sum(await app.state.runner.map(square, range(5)))
"""


def test_fastapi_under_uvicorn_with_workers(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(_ASGI)
    with _served(tmp_path, "uvicorn", "--workers=2", "--fd={fd}", "service:app") as url:
        assert {_get(url) for _ in range(4)} == {"30"}


def test_fastapi_under_hypercorn(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(_ASGI)
    with _served(tmp_path, "hypercorn", "--bind=fd://{fd}", "service:app") as url:
        assert {_get(url) for _ in range(4)} == {"30"}


_CELERY = """
import multiprocessing
from celery import Celery
import percore

app = Celery("tasks", broker="filesystem://", backend="file://{folder}/results")
app.conf.broker_transport_options = {{
    "data_folder_in": "{folder}/queue", "data_folder_out": "{folder}/queue", "control_folder": "{folder}/control"
}}
executor = percore.LoopPoolExecutor(2)
if multiprocessing.parent_process() is None:
    executor.submit(abs, -1).result()  # before Celery forks

def square(number):
    return number * number

@app.task
def total(count):
    return sum(executor.map(square, range(count)))
"""


def test_a_task_of_celery_uses_an_executor_that_was_used_before_the_fork(tmp_path: Path) -> None:
    for name in ("queue", "control", "results"):
        (tmp_path / name).mkdir()
    (tmp_path / "tasks.py").write_text(_CELERY.format(folder=tmp_path))
    worker = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "tasks", "worker", "--concurrency=1", "--without-gossip", "--without-mingle"],
        cwd=tmp_path,
        env={**os.environ, "C_FORCE_ROOT": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        told = output_of(f"from tasks import total\nprint(total.delay(5).get(timeout={TIMEOUT - 10}))\n", tmp_path)
    finally:
        worker.terminate()
        worker.wait(TIMEOUT)
    assert told == "30\n"


# Tools that have a ProcessPoolExecutor of their own

_INSTEAD = """
import concurrent.futures, functools, sys
import percore
pool = functools.partial(percore.LoopPoolExecutor, max_threads=1)
concurrent.futures.ProcessPoolExecutor = pool
"""


def test_black_formats_many_files(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"module_{number}.py").write_text("x = {  'a':1 }\n")
    program = f"""{_INSTEAD}
import black.concurrency
black.concurrency.ProcessPoolExecutor = pool
if __name__ == "__main__":
    from black import patched_main
    sys.argv[1:] = ["--workers=2", "--quiet", *map("module_{{}}.py".format, range(20))]
    patched_main()
"""
    assert output_of(program, tmp_path, environment={"BLACK_CACHE_DIR": tmp_path / "cache"}) == ""
    assert {path.read_text() for path in tmp_path.glob("module_*.py")} == {'x = {"a": 1}\n'}


def test_pylint_checks_in_jobs(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"module_{number}.py").write_text('"""A module."""\n\nimport os\n')
    program = f"""{_INSTEAD}
if __name__ == "__main__":
    from pylint.lint import Run
    Run(["--jobs=2", "--score=n", "--persistent=n", *map("module_{{}}.py".format, range(6))])
"""
    (tmp_path / "program.py").write_text(program)
    done = python("program.py", cwd=tmp_path, environment={"PYLINTHOME": tmp_path / "home"})
    assert done.err == ""
    assert done.out.count("W0611") == 6


def test_dask_computes_on_an_executor(tmp_path: Path) -> None:
    program = """
import dask
import percore

@dask.delayed
def square(number):
    return number * number

if __name__ == "__main__":
    with percore.LoopPoolExecutor(2) as executor:
        print(dask.delayed(sum)([square(number) for number in range(5)]).compute(scheduler=executor))
"""
    assert output_of(program, tmp_path) == "30\n"


def test_adaptive_samples_a_function(tmp_path: Path) -> None:
    program = """
import adaptive
import percore

def peak(x):
    return x + 0.01 / (0.01 + x * x)

if __name__ == "__main__":
    learner = adaptive.Learner1D(peak, (-1, 1))
    with percore.LoopPoolExecutor(2, max_threads=1) as executor:
        adaptive.BlockingRunner(learner, npoints_goal=30, executor=executor, ntasks=executor._max_workers)
    print(learner.npoints >= 30)
"""
    assert output_of(program, tmp_path) == "True\n"


def test_tests_under_xdist(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("""
import asyncio
import percore

def square(number):
    return number * number

def test_a_runner():
    async def main():
        async with percore.Runner(1) as runner:
            return await runner.map(square, range(5))
    assert asyncio.run(main()) == [0, 1, 4, 9, 16]

def test_an_executor():
    with percore.LoopPoolExecutor(1) as executor:
        assert list(executor.map(square, range(5))) == [0, 1, 4, 9, 16]
""")
    done = python("-m", "pytest", "-n2", "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert (done.code, "2 passed" in done.out) == (0, True), done


# Logging


def test_loguru_enqueues_the_messages_of_workers(tmp_path: Path) -> None:
    program = """
import sys
from loguru import logger
import percore

def setup(given):
    global log
    log = given

def work(number):
    log.info("number {}", number)
    return number

if __name__ == "__main__":
    logger.remove()
    logger.add(sys.stdout, enqueue=True, format="{message}")
    with percore.LoopPoolExecutor(2, initializer=setup, initargs=(logger,)) as executor:
        assert list(executor.map(work, range(4))) == [0, 1, 2, 3]
    logger.complete()
"""
    assert sorted(output_of(program, tmp_path).splitlines()) == [f"number {number}" for number in range(4)]


def test_structlog_in_workers_reaches_the_programs_handlers(tmp_path: Path) -> None:
    program = """
import logging, sys
import percore
import structlog

structlog.configure(
    processors=[structlog.processors.JSONRenderer(sort_keys=True)], logger_factory=structlog.stdlib.LoggerFactory(),
)

def work(number):
    structlog.get_logger("app").warning("worked", number=number)

if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(name)s %(worker)s %(message)s")
    with percore.LoopPoolExecutor(1) as executor:
        executor.submit(work, 3).result()
"""
    assert output_of(program, tmp_path) == 'app 0 {"event": "worked", "number": 3}\n'


def test_sentry_gets_the_errors_of_calls_with_their_cause(tmp_path: Path) -> None:
    program = """
import percore
import sentry_sdk
from sentry_sdk.transport import Transport

class Printer(Transport):
    def capture_envelope(self, envelope):
        for value in envelope.get_event()["exception"]["values"]:
            print(value["type"])

def fail():
    raise LookupError("in the worker")

if __name__ == "__main__":
    sentry_sdk.init(dsn="http://key@127.0.0.1/1", transport=Printer, default_integrations=False)
    with percore.LoopPoolExecutor(1) as executor:
        try:
            executor.submit(fail).result()
        except LookupError:
            sentry_sdk.capture_exception()
"""
    assert output_of(program, tmp_path) == "_RemoteTraceback\nLookupError\n"


# Surroundings


def test_gevent_patches_the_program_and_its_workers(tmp_path: Path) -> None:
    program = """
from gevent import monkey
monkey.patch_all()
import asyncio, os, time
import gevent
import percore

def square(number):
    time.sleep(0)
    return number * number

async def main():
    async with percore.Runner(1) as runner:
        return await runner.map(square, range(5))

if __name__ == "__main__":
    for options in ({}, {"max_threads": 1}):
        with percore.LoopPoolExecutor(2, **options) as executor:
            greenlets = [gevent.spawn(lambda number=number: executor.submit(square, number).result()) for number in range(5)]
            gevent.joinall(greenlets)
            print([one.value for one in greenlets])
    print(asyncio.run(main()))
"""
    (tmp_path / "program.py").write_text(program)
    done = python("-W", "ignore", "program.py", cwd=tmp_path)
    assert (done.code, done.out) == (0, "[0, 1, 4, 9, 16]\n" * 3), done


def test_a_program_packed_by_shiv(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("percore", "cloudpickle", "psutil", "uvloop"):
        (packages / name).symlink_to(Path(__import__(name).__file__ or "").parent)
    (packages / "app.py").write_text("""
import asyncio
import percore

def square(number):
    return number * number

async def run():
    async with percore.Runner(2) as runner:
        print(await runner.map(square, range(5)), await runner.map(lambda number: -number, range(2)))

def main():
    asyncio.run(run())
""")
    packed = tmp_path / "app.pyz"
    shiv = [sys.executable, "-m", "shiv", f"--site-packages={packages}", "--entry-point=app:main", f"--output-file={packed}"]
    assert execute(shiv, cwd=tmp_path).code == 0
    done = python(packed, cwd=tmp_path, environment={"SHIV_ROOT": tmp_path / "root"})
    assert done == (0, "[0, 1, 4, 9, 16] [0, -1]\n", "")
