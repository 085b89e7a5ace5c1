"""The public face: every name is there, nothing is loaded before it is used, and no more than it needs."""

import ast
import gc
import importlib.metadata
import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import percore
from percore._common.system import IS_FREE_THREADED

HEAVY = {
    "aiohttp",
    "asyncio",
    "cloudpickle",
    "concurrent.futures",
    "ctypes",
    "inspect",
    "logging",
    "multiprocessing",
    "numpy",
    "pickle",
    "psutil",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "typing_extensions",
    "uvloop",
}


def loaded_by(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after `code` and had not before."""
    program = f"import sys, json\nbefore = set(sys.modules)\n{code}\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stderr == ""
    return set(json.loads(run.stdout))


def test_every_public_name_is_there() -> None:
    for name in percore.__all__:
        value = getattr(percore, name)
        assert value.__name__ == name
        assert value.__doc__


def test_a_public_thing_has_its_public_home(subtests: pytest.Subtests) -> None:
    for name in percore.__all__:
        with subtests.test(name=name):
            home = getattr(percore, name).__module__
            assert home == "percore" or home.startswith("percore._")


def test_the_list_is_sorted_and_names_nothing_twice() -> None:
    assert percore.__all__ == sorted(set(percore.__all__), key=lambda name: (name[0].islower(), name))


def test_the_lists_of_names_agree() -> None:
    assert set(percore._HOMES) == set(percore.__all__)
    tree = ast.parse(Path(percore.__file__).read_text())
    typed: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for imported in node.body:
                assert isinstance(imported, ast.ImportFrom)
                typed.update({alias.name: f"{imported.module}" for alias in imported.names})
    assert typed == {name: f"percore.{home}" for name, home in percore._HOMES.items()}


def test_star_gives_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from percore import *", names)
    assert set(names) - {"__builtins__"} == set(percore.__all__)


def test_dir_shows_the_public_names_alone_loaded_or_not() -> None:
    code = "import percore; print(*(name for name in dir(percore) if not name.startswith('__')))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert sorted(run.stdout.split()) == sorted(percore.__all__)
    assert [name for name in dir(percore) if not name.startswith("__")] == percore.__all__


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """The public functions, classes, and methods of public classes, by name."""
    for name in percore.__all__:
        value = getattr(percore, name)
        yield name, value
        for attribute in dir(value) if inspect.isclass(value) else ():
            member = inspect.getattr_static(value, attribute)
            member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if inspect.isfunction(member) and (attribute == "__init__" or not attribute.startswith("_")):
                yield f"{name}.{attribute}", member


def test_the_types_of_every_public_callable_are_there_at_run_time(subtests: pytest.Subtests) -> None:
    for name, value in public_callables():
        with subtests.test(name=name):
            get_type_hints(value)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'percore' has no attribute 'Nothing'"):
        _ = percore.Nothing  # type: ignore[attr-defined]
    assert not hasattr(percore, "Nothing")


def test_a_name_is_looked_up_once() -> None:
    assert percore.Runner is percore.Runner
    assert "Runner" in vars(percore)


def test_the_version_is_the_packages() -> None:
    assert percore.__version__ == importlib.metadata.version("percore")


def test_it_is_typed() -> None:
    assert Path(percore.__file__).with_name("py.typed").exists()


def test_importing_it_imports_nothing() -> None:
    loaded = loaded_by("import percore")
    assert {name for name in loaded if name.startswith("percore")} <= {"percore"}
    assert not loaded & (HEAVY | {"typing"})


def test_an_error_of_the_vocabulary_costs_the_vocabulary() -> None:
    loaded = loaded_by("import percore; percore.RemoteError")
    assert {name for name in loaded if name.startswith("percore")} == {"percore", "percore._common", "percore._common.errors"}
    assert not loaded & HEAVY


def test_what_a_worker_uses_loads_nothing_of_the_supervisors_half() -> None:
    loaded = loaded_by("import percore; percore.state; percore.current_worker; percore.CurrentWorker")
    forbidden = (
        "_calls",
        "_engines",
        "_executor",
        "_map",
        "_monitor",
        "_runner",
        "_scheduler",
        "_supervisor",
        "_common.worker_errors",
    )
    assert not [name for name in loaded if name.startswith(tuple(f"percore.{name}" for name in forbidden))]
    assert not loaded & {"multiprocessing", "psutil", "concurrent.futures.process", "cloudpickle", "uvloop"}


def test_the_runner_needs_no_test_or_user_packages() -> None:
    loaded = loaded_by("import percore; percore.Runner")
    assert not loaded & {"psutil", "numpy", "aiohttp", "cloudpickle", "pytest"}


UNTIL_THE_FORK_SERVER = """
import os
def stop(event, arguments):
    if event == "subprocess.Popen":
        print(json.dumps(sorted(set(sys.modules) - before)), flush=True)
        os._exit(0)
sys.addaudithook(stop)
"""
"""Ends the program, with the modules that it has loaded, when it starts a process."""


def of_percore(loaded: set[str]) -> list[str]:
    return [name for name in loaded if name.startswith("percore.")]


def test_a_program_starts_its_fork_server_before_it_imports_what_its_workers_need_not_wait_for(subtests: pytest.Subtests) -> None:
    """Both processes import at the same time, whether or not the program has imported asyncio before."""
    call = "import percore; percore.LoopPoolExecutor(1).submit(abs, 1)"
    for name, program, most in (
        ("executor", call, 27),
        ("executor after asyncio", f"import asyncio; {call}", 27),
        ("map", "import percore; percore.LoopPoolExecutor(1).map(abs, [1])", 27),
        ("map in chunks", "import percore; percore.LoopPoolExecutor(1).map(abs, [1, 2], chunksize=2)", 28),
        ("runner", "import asyncio, percore; asyncio.run(percore.Runner(1).start())", 29),
    ):
        with subtests.test(name=name):
            loaded = loaded_by(UNTIL_THE_FORK_SERVER + program)
            assert "percore._engines.processes.launch" in loaded
            assert len(of_percore(loaded)) <= most, sorted(loaded)
            if name == "executor":
                # Since Python 3.14 a NamedTuple needs ast, since 3.15 a class of it alone, and logging needs dataclasses.
                needed = loaded_by("import logging, typing; exec('class One(typing.NamedTuple): x: int')")
                assert not (loaded - needed) & {"asyncio", "ast", "dataclasses", "inspect", "ssl", "uvloop"}


@pytest.mark.skipif(IS_FREE_THREADED, reason="without a GIL a collection also waits until a quarter of all objects is new")
def test_an_import_runs_without_collections_and_leaves_the_collector_as_others_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before, was_enabled = gc.get_threshold(), gc.isenabled()
    objects: list[list[int]] = []

    def collections() -> int:
        return sum(one["collections"] for one in gc.get_stats())

    def collects() -> bool:
        began = collections()
        objects.extend([] for _ in range(2000))
        return collections() > began

    def failing(name: str, meanwhile: Callable[[], object]) -> bool:
        """Import a module that cannot be imported, and return whether collections ran meanwhile."""
        seen: list[bool] = []

        def import_module(name: str) -> None:
            seen.append(collects())
            meanwhile()
            raise ImportError(name)

        monkeypatch.setattr(percore, "import_module", import_module)
        with pytest.raises(ImportError, match="missing"):
            percore._import_uncollected(name)
        return seen[0]

    try:
        gc.enable()
        gc.set_threshold(700, *before[1:])
        assert collects()
        assert not failing("missing", lambda: None)
        assert gc.isenabled()
        assert gc.get_threshold()[0] == 700
        assert not failing("missing", gc.disable)  # as by another thread
        assert not gc.isenabled()
        gc.enable()
        assert not failing("missing", lambda: gc.set_threshold(900))
        assert gc.get_threshold()[0] == 900
    finally:
        gc.set_threshold(*before)
        (gc.enable if was_enabled else gc.disable)()


def test_a_start_imports_so_many_modules(subtests: pytest.Subtests) -> None:
    """Each costs a short program about a quarter of a millisecond.

    A bound rises only with a reason: a module of a feature that few programs use can be imported with its first use.
    """
    for name, imports, most in (
        ("program", "percore._runner.early; [__import__(name) for name in percore._runner.early.MODULES]", 119),
        ("fork server", "percore._worker_process.fork_server, percore._worker_process.main", 70),
    ):
        with subtests.test(name=name):
            loaded = loaded_by(f"import {imports}")
            assert len(of_percore(loaded)) <= most, len(of_percore(loaded))
            assert not loaded & {"psutil", "numpy", "aiohttp", "cloudpickle"}
            if name == "fork server":  # since Python 3.14 logging imports dataclasses
                assert "dataclasses" not in loaded - loaded_by("import asyncio")
