"""The supervisor's `__main__` in a worker: how each launch style is told, and the lazy module that imports it."""

import asyncio
import json
import pickle
import subprocess
import sys
import threading
import zipapp
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from percore._serialization.exceptions import dump_exception, load_exception
from percore._worker import context
from percore._worker_process import main_module
from percore._worker_process.main_module import MainInfo, alias_main, install, main_info

SRC = Path(main_module.__file__).parents[2]

TELL = """
import json
from percore._worker_process.main_module import main_info
print(json.dumps(main_info().as_tuple()))
"""


def run(*arguments: str, cwd: Path, stdin: str = "") -> list[Any]:
    """What the last line of a Python program says, as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=cwd,
        input=stdin,
        env={"PYTHONPATH": f"{SRC}:{cwd}", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1]))


# Which main


def test_a_script_is_told_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TELL)
    assert run("script.py", cwd=tmp_path) == ["script", str(tmp_path / "script.py")]
    assert run("-m", "script", cwd=tmp_path) == ["module", "script"]


def test_a_script_needs_no_suffix_and_may_be_compiled(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text(TELL)
    assert run("tool", cwd=tmp_path) == ["script", str(tmp_path / "tool")]


def test_a_module_in_a_package(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "tool.py").write_text(TELL)
    (tmp_path / "pack" / "__main__.py").write_text(TELL)
    assert run("-m", "pack.tool", cwd=tmp_path) == ["module", "pack.tool"]
    assert run("-m", "pack", cwd=tmp_path) == ["value", ""]
    assert run("pack", cwd=tmp_path) == ["value", ""]
    zipapp.create_archive(tmp_path / "pack", tmp_path / "app.pyz")
    assert run("app.pyz", cwd=tmp_path) == ["value", ""]


def test_what_has_no_file_goes_by_value(tmp_path: Path) -> None:
    assert run("-c", TELL, cwd=tmp_path) == ["value", ""]
    assert run("-", cwd=tmp_path, stdin=TELL) == ["value", ""]
    assert run(cwd=tmp_path, stdin=TELL) == ["value", ""]
    assert run("-i", "-q", cwd=tmp_path, stdin=TELL) == ["value", ""]


def test_a_prompt_after_a_script_goes_by_value(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    assert run("-i", "-q", "script.py", cwd=tmp_path, stdin=TELL) == ["value", ""]


def test_no_main_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "__main__")
    assert main_info() == MainInfo("none", "")
    assert main_info().by_value


def test_info_is_a_plain_tuple_for_the_wire() -> None:
    info = MainInfo("script", "/x.py")
    assert type(info.as_tuple()) is tuple
    assert MainInfo(*info.as_tuple()) == info
    assert not info.by_value
    assert not MainInfo("module", "m").by_value
    assert MainInfo("value", "").by_value


def test_the_alias_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "__mp_main__", raising=False)
    monkeypatch.setitem(sys.modules, "__mp_main__", ModuleType("other"))
    alias_main()
    assert sys.modules["__mp_main__"].__name__ == "other"
    monkeypatch.delitem(sys.modules, "__mp_main__")
    alias_main()
    assert sys.modules["__mp_main__"] is sys.modules["__main__"]


# The lazy module. In this process: what install() puts into sys.modules is taken out again.


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setitem(sys.modules, "__mp_main__", ModuleType("before"))
    monkeypatch.delitem(sys.modules, "__mp_main__")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    kept = list(main_module._replaced)
    yield
    main_module._replaced[:] = kept


def script(folder: Path, text: str) -> MainInfo:
    path = folder / "script.py"
    path.write_text("import sys\nsys.percore_runs = getattr(sys, 'percore_runs', 0) + 1\n" + text)
    return MainInfo("script", str(path))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """How often the script was run."""
    monkeypatch.setattr(sys, "percore_runs", 0, raising=False)
    return lambda: sys.percore_runs  # type: ignore[attr-defined]


def look_up(name: str) -> Any:
    return getattr(sys.modules["__main__"], name)


@pytest.mark.usefixtures("fresh")
def test_main_runs_when_something_of_it_is_needed_and_once(tmp_path: Path, runs: Any) -> None:
    text = """
from dataclasses import dataclass
from typing import get_type_hints
count = 0
@dataclass
class Page:
    url: "str"
hints = get_type_hints(Page)
def bump():
    global count
    count += 1
    return Page("u")
if __name__ == "__main__":
    raise SystemExit("the guard did not hold")
"""
    install(script(tmp_path, text))
    lazy = sys.modules["__main__"]
    assert not hasattr(lazy, "__path__")
    assert not hasattr(lazy, "__no_such__")
    assert runs() == 0
    assert look_up("bump")().url == "u"
    assert look_up("bump") is lazy.bump is sys.modules["__mp_main__"].bump
    assert look_up("count") == lazy.count == 1, "the module's dictionary is the functions' globals"
    assert look_up("Page").__module__ == "__mp_main__"
    assert look_up("hints") == {"url": str}
    assert runs() == 1
    with pytest.raises(AttributeError):
        look_up("missing")
    with pytest.raises(AttributeError):
        lazy.missing  # noqa: B018
    assert runs() == 1
    assert context.importing_main is False
    assert list(tmp_path.glob("__pycache__")) == []


@pytest.mark.usefixtures("fresh")
def test_what_lives_in_main_travels_by_name(tmp_path: Path, runs: Any) -> None:
    install(script(tmp_path, "class Lost(Exception):\n    def __init__(self, a, b):\n        self.a = a\n"))
    error = pickle_loads_of("__main__", "Lost")(1, 2)
    back = load_exception(dump_exception(error, Buffer, main_by_value=False).data)
    assert type(back) is type(error)
    assert runs() == 1


class Buffer:
    data = b""

    def write(self, data: Any, /) -> object:
        self.data += data
        return None

    def contains(self, needle: bytes) -> bool:
        return needle in self.data

    def reset(self) -> None:
        self.data = b""


def pickle_loads_of(module: str, name: str) -> Any:
    import pickle

    return pickle.loads(f"c{module}\n{name}\n.".encode())


@pytest.mark.usefixtures("fresh")
def test_names_of_the_mp_main_are_found_too(tmp_path: Path, runs: Any) -> None:
    install(script(tmp_path, "def f(): return 3\n"))
    assert pickle_loads_of("__mp_main__", "f")() == 3
    assert look_up("f") is sys.modules["__mp_main__"].f
    assert look_up("__name__") == "__mp_main__"
    assert look_up("__spec__") is None
    assert runs() == 1


@pytest.mark.usefixtures("fresh")
def test_searching_all_modules_does_not_run_main(tmp_path: Path, runs: Any) -> None:
    import inspect
    import pickle

    install(script(tmp_path, ""))

    function = eval("lambda: 0", {})
    function.__module__ = None
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(function)
    inspect.getmodule(test_searching_all_modules_does_not_run_main)
    assert runs() == 0


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("ending", ["raise ValueError('boom')", "sys.exit(3)", "raise KeyboardInterrupt", "1 +"])
def test_a_failure_is_remembered_and_raised_at_each_need(tmp_path: Path, runs: Any, ending: str) -> None:
    install(script(tmp_path, f"def f(): ...\n{ending}\n"))
    lazy = sys.modules["__main__"]
    causes = []
    for _ in range(2):
        with pytest.raises(ImportError, match=r"script.*script\.py") as caught:
            look_up("f")
        causes.append(caught.value.__cause__)
    assert causes[0] is causes[1] is not None
    assert type(causes[0]).__name__ in str(caught.value)
    assert runs() <= 1
    with pytest.raises(ImportError, match=r"script.*script\.py"):
        pickle_loads_of("__mp_main__", "f")
    assert sys.modules["__main__"] is lazy
    assert "__mp_main__" not in sys.modules
    assert context.importing_main is False


@pytest.mark.usefixtures("fresh")
def test_a_script_that_is_gone(tmp_path: Path) -> None:
    install(MainInfo("script", str(tmp_path / "gone.py")))
    with pytest.raises(ImportError, match="FileNotFoundError"):
        look_up("f")
    install(MainInfo("module", "percore_no_such_module"))
    with pytest.raises(ImportError, match="your module 'percore_no_such_module'"):
        look_up("f")


@pytest.mark.usefixtures("fresh")
def test_a_module_runs_with_its_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "percore_pack"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "other.py").write_text("value = 5\n")
    (package / "tool.py").write_text("from .other import value\ndef f(): return value, __name__, __package__\n")
    monkeypatch.syspath_prepend(tmp_path)
    install(MainInfo("module", "percore_pack.tool"))
    assert sys.modules["__main__"].__spec__.name == "percore_pack.tool"  # type: ignore[union-attr]
    assert "percore_pack" not in sys.modules
    assert look_up("f")() == (5, "__mp_main__", "percore_pack")
    assert look_up("__file__") == str(package / "tool.py")
    for name in ("percore_pack", "percore_pack.other"):
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("fresh")
def test_a_compiled_script(tmp_path: Path, runs: Any) -> None:
    import py_compile

    info = script(tmp_path, "def f(): return 4\n")
    compiled = py_compile.compile(info.target, cfile=str(tmp_path / "script.pyc"))
    install(MainInfo("script", str(compiled)))
    assert look_up("f")() == 4
    assert runs() == 1


@pytest.mark.usefixtures("fresh")
def test_by_value_and_none_leave_an_empty_main() -> None:
    for kind in ("value", "none"):
        install(MainInfo(kind, ""))
        assert "__getattr__" not in vars(sys.modules["__main__"])
        assert "__mp_main__" not in sys.modules


@pytest.mark.usefixtures("fresh")
def test_the_running_thread_sees_what_is_there_so_far(tmp_path: Path, runs: Any) -> None:
    install(script(tmp_path, "a = 1\nfrom __main__ import a as b\nhad = hasattr(sys.modules['__main__'], 'c')\nc = 1\n"))
    assert look_up("b") == 1
    assert look_up("had") is False
    assert runs() == 1


@pytest.mark.usefixtures("fresh")
def test_another_thread_waits_for_the_whole_main(tmp_path: Path, runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def meet() -> None:
        entered.set()
        assert go_on.wait(20)

    monkeypatch.setattr(sys, "percore_meet", meet, raising=False)
    install(script(tmp_path, "def f(): return late\nsys.percore_meet()\nlate = 9\n"))
    results: list[object] = []
    first = threading.Thread(target=lambda: results.append(look_up("f")()))
    first.start()
    assert entered.wait(20)
    asking = threading.Event()

    def second_looks() -> None:
        asking.set()
        results.append(look_up("f")())  # too early, f would not find `late`

    second = threading.Thread(target=second_looks)
    second.start()
    assert asking.wait(20)
    assert results == []
    go_on.set()
    first.join(20)
    second.join(20)
    assert results == [9, 9]
    assert runs() == 1


class _ToldLock:
    """The lock of an importer. It tells when another thread than the first one is about to take it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._first = threading.get_ident()
        self.is_wanted = threading.Event()

    def __enter__(self) -> None:
        if threading.get_ident() != self._first:
            self.is_wanted.set()
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("ending", ["", "raise RuntimeError('by its author')"])
def test_a_name_that_another_worker_has_sent_waits_for_the_whole_main(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Workers pickle functions of the script as names of `__mp_main__`, for example when a call makes calls."""
    install(script(tmp_path, f"def f(): return late\nsys.percore_meet()\nlate = 9\n{ending}"))
    importer: Any = vars(sys.modules["__main__"])["__getattr__"].__self__
    lock = importer._lock = _ToldLock(importer._lock)
    results: list[object] = []

    def second_looks() -> None:
        try:
            results.append(pickle.loads(b"c__mp_main__\nf\n.")())
        except ImportError as error:
            results.append(str(error.__cause__))

    second = threading.Thread(target=second_looks)

    def meet() -> None:  # in the middle of the script, which this thread runs
        second.start()
        assert lock.is_wanted.wait(20)
        assert results == []

    monkeypatch.setattr(sys, "percore_meet", meet, raising=False)
    if ending:
        with pytest.raises(ImportError, match="by its author"):
            look_up("f")
    else:
        assert look_up("f")() == 9
        assert type(sys.modules["__mp_main__"]) is ModuleType
    second.join(20)
    assert results == ["by its author" if ending else 9]


@pytest.mark.usefixtures("fresh")
@pytest.mark.both_loops
async def test_an_unguarded_asyncio_run_gets_as_far_as_its_own_error(tmp_path: Path) -> None:
    text = """
import asyncio
from percore._worker import context
async def main():
    asyncio.current_task().get_name()
    await asyncio.sleep(0)
    if context.importing_main:
        raise RuntimeError("percore was started while a worker imports your script")
asyncio.run(main())
"""
    install(script(tmp_path, text))
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    with pytest.raises(ImportError, match="percore was started while a worker imports"):
        look_up("f")
    assert asyncio.get_running_loop() is loop
    assert asyncio.current_task() is task
    await asyncio.sleep(0)  # the loop goes on


@pytest.mark.usefixtures("fresh")
async def test_a_loop_without_a_task_is_put_back_too(tmp_path: Path) -> None:
    install(script(tmp_path, "import asyncio\nran = asyncio.run(asyncio.sleep(0, 'done'))\n"))
    loop = asyncio.get_running_loop()
    found = loop.create_future()
    loop.call_soon(lambda: found.set_result((look_up("ran"), asyncio.get_running_loop() is loop)))
    assert await found == ("done", True)


WORKER = """
import json, pickle, sys
from percore._worker_process.main_module import MainInfo, install
info, data = pickle.loads(bytes.fromhex(sys.stdin.read()))
install(MainInfo(*info))
fn, argument = pickle.loads(data)
print(json.dumps(fn(argument)))
"""

SUPERVISOR = """
import io, json, pickle, subprocess, sys
from percore._serialization.pickler import dump
from percore._worker_process.main_module import main_info

class Page:
    def __init__(self, size): self.size = size

def double(page):
    assert type(page) is Page, type(page)
    return [page.size * 2, __name__]

class File(io.BytesIO):
    def contains(self, needle): return needle in self.getvalue()
    def reset(self): self.seek(0); self.truncate()

if __name__ == "__main__":
    info, file = main_info(), File()
    dump((double, Page(21)), file, main_by_value=info.by_value)
    message = pickle.dumps((info.as_tuple(), file.getvalue())).hex()
    out = subprocess.run([sys.executable, "-c", sys.argv[-1]], input=message, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    print(json.dumps([info.kind, *json.loads(out.stdout)]))
"""


def test_functions_and_classes_of_every_kind_of_main_reach_another_process(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "script.py").write_text(SUPERVISOR)
    (tmp_path / "pack" / "__main__.py").write_text(SUPERVISOR)
    zipapp.create_archive(tmp_path / "pack", tmp_path / "app.pyz")
    for arguments, stdin, kind, name in (
        (["script.py"], "", "script", "__mp_main__"),
        (["-m", "script"], "", "module", "__mp_main__"),
        (["-m", "pack"], "", "value", "__main__"),
        (["pack"], "", "value", "__main__"),
        (["app.pyz"], "", "value", "__main__"),
        (["-c", SUPERVISOR], "", "value", "__main__"),
        (["-"], SUPERVISOR, "value", "__main__"),
    ):
        assert run(*arguments, WORKER, cwd=tmp_path, stdin=stdin) == [kind, 42, name], arguments
