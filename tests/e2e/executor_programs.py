"""Programs with executors that end, are killed and fork: python -m tests.e2e.executor_programs STORY METHOD"""

import atexit
import multiprocessing
import os
import sys
import threading
import time
import warnings
from typing import Any

import percore
from tests.e2e.fault_programs import say

_kept: list[Any] = []


def stay() -> None:
    say("calls")
    threading.Event().wait()


def tell(word: str) -> str:
    say(word)
    return word


def tell_later(word: str) -> None:
    time.sleep(0.2)
    say(word)


def open_executor(method: str, **options: Any) -> "percore.LoopPoolExecutor":
    context: Any = None if method == "percore" else multiprocessing.get_context(method)
    return percore.LoopPoolExecutor(2, context, **options)


def pending_at_the_end(method: str) -> None:
    executor = open_executor(method, max_threads=1)
    _kept.append(executor)
    for number in range(6):
        executor.submit(tell_later, f"call-{number}")
    say("end")


def shut_without_waiting(method: str) -> None:
    executor = open_executor(method, max_threads=1)
    executor.submit(tell_later, "apple")
    executor.shutdown(wait=False)
    say("end")


def cancelled_without_waiting(method: str) -> None:
    executor = open_executor(method, max_threads=1)
    futures = [executor.submit(tell_later, "apple") for _ in range(100)]
    executor.shutdown(wait=False, cancel_futures=True)
    futures[0].result()
    say("cancelled" if futures[-1].cancelled() else "never")


def collected_while_busy(method: str) -> None:
    executor = open_executor(method)
    future = executor.submit(tell_later, "apple")
    del executor
    future.result()
    say("end")


def ended_in_a_thread(method: str) -> None:
    def work() -> None:
        with open_executor(method) as executor:
            executor.submit(tell, "apple").result()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    submitted = threading.Event()

    def leave() -> None:
        executor = open_executor(method)
        _kept.append((executor, executor.submit(tell_later, "pear")))
        submitted.set()

    threading.Thread(target=leave).start()
    submitted.wait()


def in_a_fork(method: str) -> None:
    executor = open_executor(method, max_threads=1)
    executor.submit(tell, "before").result()
    held = [executor.submit(tell_later, "held") for _ in range(4)]
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
    pid = os.fork()
    if pid == 0:
        assert executor.statistics().workers == ()
        assert len(executor.usage().processes) == 1  # and does not wait for a thread that is in the parent alone
        executor.submit(tell, "child").result()
        executor.submit(tell_later, "child later")
        executor.shutdown()
        executor.shutdown()
        with open_executor(method) as own:
            own.submit(tell, "fork").result()
        del executor
        sys.exit(7)
    say("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    for future in held:
        future.result()
    executor.submit(tell, "after").result()
    executor.shutdown()


def forked_before_its_first_use(method: str) -> None:
    """As programs that a server loads before it forks its workers."""
    executor = open_executor(method, max_threads=1)
    warnings.simplefilter("ignore", DeprecationWarning)  # of the last fork, beside threads
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            executor.submit(tell, "fork").result()
            executor.shutdown()
            sys.exit(7)
        say("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    pid = os.fork()
    if pid == 0:
        _kept.append(executor.submit(tell, "pending"))
        sys.exit(7)
    say("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    with executor:
        executor.submit(tell, "program").result()


def one_after_another(method: str) -> None:
    """The fork server is the parent of its workers, and each process here that has used an executor has its own."""
    parents = []
    for _ in range(2):
        with open_executor(method) as executor:
            parents.append(executor.submit(os.getppid).result())
    say("kept" if len(set(parents)) == 1 and alive(parents[0]) else f"not kept: {parents}")
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
    pid = os.fork()
    if pid == 0:
        with open_executor(method) as executor:
            own = executor.submit(os.getppid).result()
        _at_the_end(own, "the fork's")
        sys.exit(0 if own != parents[0] and alive(parents[0]) else 7)
    say("code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    with open_executor(method) as executor:
        say("kept" if executor.submit(os.getppid).result() == parents[0] else "not kept beside a fork")
    _at_the_end(parents[0], "the program's")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)  # also works for a process that nobody has reaped
    except ProcessLookupError:
        return False
    return True


def _at_the_end(pid: int, name: str) -> None:
    atexit.register(lambda: say(f"{name} remains" if alive(pid) else f"{name} is reaped"))


def killed(method: str) -> None:
    executor = open_executor(method, max_threads=1)
    _kept.append([executor.submit(stay) for _ in range(1000)])
    say("ready")
    threading.Event().wait()


def killed_in_a_call(method: str) -> None:
    """Nested: the program's worker has an executor of its own."""
    executor = open_executor(method)
    _kept.append(executor.submit(killed, method))
    say("ready")
    threading.Event().wait()


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
