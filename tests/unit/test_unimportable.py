"""Which modules a worker cannot import."""

import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from percore._serialization import pickler, reducers, unimportable
from percore._serialization.pickler import is_by_reference

SOURCE = "def f(): pass\nclass C:\n    def method(self): pass\n"


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    def add(name: str, source: str = SOURCE, file: Path | None = None) -> ModuleType:
        if file is None:
            module = ModuleType(name)
        else:
            file.write_text(source)
            spec = importlib.util.spec_from_file_location(name, file)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        exec(source, vars(module))
        return module

    return add


def test_what_the_program_has_imported_can_be_imported() -> None:
    ours = {
        name
        for name in unimportable.unimportable()
        if name.partition(".")[0] in ("percore", "tests", "asyncio", "pytest", "aiohttp")
    }
    assert ours == set()


def test_what_was_made_or_loaded_from_a_path_cannot(add: Callable[..., ModuleType], tmp_path: Path) -> None:
    made = add("percore_made")
    loaded = add("percore_loaded", file=tmp_path / "percore_loaded.py")
    within = add("json.percore_within", file=tmp_path / "percore_within.py")
    for module in (made, loaded, within):
        assert unimportable.unimportable()[module.__name__] is module
        assert not is_by_reference(module.f)
        assert not is_by_reference(module.C)


def test_what_lies_on_the_path_can(add: Callable[..., ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add("percore_other", file=tmp_path / "percore_other.py")
    assert "percore_other" in unimportable.unimportable()
    monkeypatch.syspath_prepend(tmp_path)
    module = add("percore_loaded", file=tmp_path / "percore_loaded.py")
    assert "percore_loaded" not in unimportable.unimportable()
    assert is_by_reference(module.f)


def test_another_file_of_that_name_is_not_taken_for_it(
    add: Callable[..., ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "searched").mkdir()
    (tmp_path / "searched" / "percore_twice.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "searched")
    add("percore_twice", file=tmp_path / "percore_twice.py")
    assert "percore_twice" in unimportable.unimportable()


def test_what_its_package_makes_is_left_to_the_package(add: Callable[..., ModuleType]) -> None:
    add("json.percore_made")
    add("percore_library_in_c", "value = 1")
    assert not {"json.percore_made", "percore_library_in_c"} & unimportable.unimportable().keys()


def test_a_worker_judges_nothing(add: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducers, "is_worker", True)
    add("percore_made_in_a_worker")
    assert "percore_made_in_a_worker" not in unimportable.unimportable()


def test_one_that_is_gone_is_forgotten(add: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    module = add("percore_short_lived")
    assert "percore_short_lived" in unimportable.unimportable()
    monkeypatch.delitem(sys.modules, "percore_short_lived")
    assert "percore_short_lived" not in unimportable.unimportable()
    assert not is_by_reference(module.f)


def test_one_that_was_replaced_unseen_harms_nobody(add: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    add("percore_replaced")
    unimportable.unimportable()
    monkeypatch.delitem(sys.modules, "percore_replaced")
    monkeypatch.setitem(sys.modules, "percore_replacement", ModuleType("percore_replacement"))
    assert pickler.value_pickler(False) is not None


def test_libraries_that_another_thread_is_importing_count_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module is in sys.modules from the first moment of its import, and has none of its names yet."""
    for name in ("cloudpickle", "multidict"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert not unimportable.is_by_value("anything")
    assert all(isinstance(needle, bytes) for needle in unimportable.needles())
    assert pickler.proxy_table().maps[0] == {}


def test_a_fork_judges_modules_anew(add: Callable[..., ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a task of Celery, whose module was imported with a longer `sys.path`."""
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        add("percore_early", file=tmp_path / "percore_early.py")
        assert "percore_early" not in unimportable.unimportable()
    assert "percore_early" not in unimportable.unimportable()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        os.write(writer, str("percore_early" in unimportable.unimportable()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 10) == b"True"
    os.close(reader)
    os.close(writer)
