"""Runs CPython's own tests of executors that have processes, in this interpreter: `program.py FD WHOSE METHOD [TEST ...]`.

WHOSE is "percore" (a LoopPoolExecutor with max_threads=1 and broken="pool") or "control" (ProcessPoolExecutor), METHOD a start
method. Without tests it tells which there are. What comes of them goes to the file descriptor FD, as lines of JSON.
"""

import importlib
import json
import os
import sys
import traceback
import unittest
from collections.abc import Iterator
from typing import Any

PACKAGE = "test.test_concurrent_futures"
PARTS = ("test_process_pool", "test_init", "test_shutdown", "test_deadlock", "test_as_completed", "test_wait")
CLASSES = {"fork": "ProcessPoolFork", "forkserver": "ProcessPoolForkserver", "spawn": "ProcessPoolSpawn"}
METHODS = tuple(CLASSES)
# Classes of the one module that held all tests before Python 3.12, and belong to none of these parts.
OTHERS = ("FutureTests", "AsCompletedWithFuture")


def subject() -> Any:
    from percore import LoopPoolExecutor

    class Subject(LoopPoolExecutor):
        """As ProcessPoolExecutor, with those of its private parts that tests use to see processes and threads end."""

        class _call_queue:  # there is none, and so no thread that feeds it
            @staticmethod
            def join_thread() -> None:
                pass

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, max_threads=1, broken="pool", **kwargs)

        @property
        def _executor_manager_thread(self) -> Any:
            return self._portal.thread

    return Subject


def put_in_place(whose: str, modules: list[Any]) -> None:
    """Make the tests use it."""
    if whose == "control":
        return
    from concurrent import futures

    executor = subject()
    futures.ProcessPoolExecutor = executor  # type: ignore[misc]
    for module in modules:
        for name, value in vars(module).items():
            if name.startswith("ProcessPool") and isinstance(value, type) and hasattr(value, "executor_type"):
                value.executor_type = executor


def modules() -> list[Any]:
    """Where the tests are: a package, or one module before Python 3.12."""
    package = importlib.import_module(PACKAGE)
    if not hasattr(package, "__path__"):
        return [package]
    return [importlib.import_module(f"{PACKAGE}.util"), *(importlib.import_module(f"{PACKAGE}.{part}") for part in PARTS)]


def cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for one in suite:
        if isinstance(one, unittest.TestSuite):
            yield from cases(one)
        else:
            yield one


def is_of(method: str, case: unittest.TestCase) -> bool:
    """Whether this test is one of the processes of this method."""
    name = type(case).__name__
    if name == "FailingInitializerResourcesTest":
        return case._testMethodName == f"test_{method}"
    of_others = [prefix for other, prefix in CLASSES.items() if other != method and len(prefix) > len(CLASSES[method])]
    return name.startswith(CLASSES[method]) and not name.startswith(tuple(of_others))


def found(method: str, tested: list[Any]) -> dict[str, unittest.TestCase]:
    loader = unittest.TestLoader()
    suites = [loader.loadTestsFromModule(module) for module in tested]
    return {case.id().removeprefix(f"{PACKAGE}."): case for suite in suites for case in cases(suite) if is_of(method, case)}


class Result(unittest.TestResult):
    """Tells what comes of each test as it comes."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._outcome = "passed", ""

    def tell(self, *line: str) -> None:
        os.write(self._fd, (json.dumps(line) + "\n").encode())

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._outcome = "passed", ""
        self.tell("began", test.id().removeprefix(f"{PACKAGE}."), "")

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self.tell(self._outcome[0], test.id().removeprefix(f"{PACKAGE}."), self._outcome[1][-1500:])

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        text = "".join(traceback.format_exception(*err))
        if isinstance(test, unittest.TestCase):
            self._outcome = "failed", text
        else:  # of a whole module
            self.tell("failed", str(test), text[-1500:])

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self.addError(test, err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._outcome = "skipped", reason


def main() -> None:
    fd, whose, method, *wanted = sys.argv[1:]
    os.set_inheritable(int(fd), False)
    result = Result(int(fd))
    try:
        tested = modules()
    except ImportError as error:
        result.tell("absent", "", f"{error}")
        return
    put_in_place(whose, tested)
    known = found(method, tested)
    if not wanted:
        for name in known:
            result.tell("there is", name, "")
        return
    unittest.TestSuite(known[name] for name in wanted).run(result)


if __name__ == "__main__":
    main()
