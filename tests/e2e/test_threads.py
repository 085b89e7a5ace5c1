"""Programs whose workers are threads: how they end."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.asyncio_only


def start(program: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", textwrap.dedent(program)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_worker_that_is_blocked_for_ever_does_not_hold_the_end_of_the_program() -> None:
    program = """
        import asyncio, threading, percore

        never = threading.Event()

        async def block():
            never.wait()

        async def main():
            async with percore.Runner(2, engine="threads", kill_after=0.05) as runner:
                calls = [runner.submit(block), runner.submit(never.wait)]
                await asyncio.sleep(0.05)
                await runner.aclose(grace=0)
                print([type(call.exception()).__name__ for call in calls])

        asyncio.run(main())
        print("main has ended")
    """
    with start(program) as child:
        output, errors = child.communicate(timeout=30)
    assert (child.returncode, errors) == (0, "")
    assert output == "['RunnerClosed', 'RunnerClosed']\nmain has ended\n"


def test_ctrl_c_is_the_main_thread_s_and_the_lifespans_are_left() -> None:
    program = """
        import asyncio, contextlib, percore

        @contextlib.asynccontextmanager
        async def lifespan():
            try:
                yield
            finally:
                print("left", flush=True)

        async def wait():
            print("begun", flush=True)
            try:
                await asyncio.sleep(3600)
            except BaseException as error:
                print(type(error).__name__, flush=True)
                raise

        async def main():
            async with percore.Runner(1, engine="threads", lifespan=lifespan) as runner:
                await runner.run(wait)

        asyncio.run(main())
    """
    with start(program) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begun\n"
        os.kill(child.pid, signal.SIGINT)
        output, errors = child.communicate(timeout=30)
    assert output == "CancelledError\nleft\n"
    assert "KeyboardInterrupt" in errors
    assert child.returncode == -signal.SIGINT
