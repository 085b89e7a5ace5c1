"""Functions and classes of modules that workers cannot import, and functions with a cache."""

from pathlib import Path

import pytest

from tests.e2e.scripts import output_of, python

_PLUGIN = """
import dataclasses
import functools
BASE = 40

@dataclasses.dataclass
class Point:
    x: int

class Own(Exception):
    pass

def work(point):
    return Point(helper(point.x))

async def awork(point):
    return work(point)

def helper(x):
    return BASE + x

@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

def fail():
    raise Own("words")
"""

_PROGRAM = """
import asyncio, importlib.util, sys, types
from pathlib import Path
import percore

def from_a_path():
    spec = importlib.util.spec_from_file_location("plugin", Path("elsewhere/plugin.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["plugin"] = module
    spec.loader.exec_module(module)
    return module

def by_exec():
    module = types.ModuleType("plugin")
    sys.modules["plugin"] = module
    exec(Path("elsewhere/plugin.py").read_text(), vars(module))
    return module

def by_exec_unregistered():
    module = by_exec()
    del sys.modules["plugin"]
    return module

def in_a_package():
    import package
    spec = importlib.util.spec_from_file_location("package.plugin", Path("elsewhere/plugin.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["package.plugin"] = package.plugin = module
    spec.loader.exec_module(module)
    return module

def x_of(point):
    return point.x

async def main(load):
    async with percore.Runner(1) as runner:
        assert await runner.run(x_of, types.SimpleNamespace(x=1)) == 1
        plugin = load()
        point = await runner.run(plugin.work, plugin.Point(2))
        assert type(point) is plugin.Point, type(point)
        assert await runner.run(plugin.awork, plugin.Point(2)) == plugin.Point(42)
        assert await runner.map(plugin.work, [plugin.Point(i) for i in range(3)]) == [plugin.Point(40 + i) for i in range(3)]
        assert await runner.run(x_of, plugin.Point(3)) == 3
        assert await runner.run(plugin.fibonacci, 20) == 6765
        try:
            await runner.run(plugin.fail)
        except plugin.Own as error:
            print(error)

if __name__ == "__main__":
    asyncio.run(main(globals()[sys.argv[1]]))
"""


@pytest.mark.parametrize("way", ["from_a_path", "by_exec", "by_exec_unregistered", "in_a_package"])
def test_modules_that_a_worker_cannot_import_travel_by_value(way: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "plugin.py").write_text(_PLUGIN)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    assert output_of(_PROGRAM, tmp_path, way) == "words\n"


def test_of_two_modules_of_one_name_the_one_that_is_loaded_travels(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "plugin.py").write_text(_PLUGIN)
    (tmp_path / "plugin.py").write_text(_PLUGIN.replace("BASE = 40", "BASE = 0"))
    assert output_of(_PROGRAM, tmp_path, "from_a_path") == "words\n"


_REGISTERED = """
import asyncio
import cloudpickle
import percore
import named

async def main():
    async with percore.Runner(1) as runner:
        cloudpickle.register_pickle_by_value(named)
        named.VALUE = 2  # a worker that imports it finds 1
        print(await runner.run(named.value), await runner.run(named.cached))
        cloudpickle.unregister_pickle_by_value(named)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_modules_registered_with_cloudpickle_travel_by_value(tmp_path: Path) -> None:
    (tmp_path / "named.py").write_text(
        "import functools\nVALUE = 1\ndef value():\n    return VALUE\n@functools.lru_cache(10)\ndef cached():\n    return VALUE\n"
    )
    assert output_of(_REGISTERED, tmp_path) == "2 2\n"


_CACHED = """
import asyncio, functools
import percore

@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

class Box:
    @functools.cached_property
    def size(self):
        return fibonacci(20)

def size(box):
    return box.size

async def main():
    async with percore.Runner(1) as runner:
        print(await runner.run(fibonacci, 20), await runner.map(fibonacci, [1, 2, 3]), await runner.run(size, Box()))

asyncio.run(main())
"""


def test_functions_with_a_cache_work_from_standard_input(tmp_path: Path) -> None:
    done = python("-", cwd=tmp_path, given=_CACHED)
    assert (done.code, done.out, done.err) == (0, "6765 [1, 1, 2] 6765\n", "")


_LATE_PATH = """
import asyncio, importlib, sys
import percore

def say(error):
    print(type(error).__name__, *error.__notes__, sep="|")

async def main():
    async with percore.Runner(1) as runner:
        sys.path.append("elsewhere")
        import late
        try:
            await runner.run(late.work)
        except ModuleNotFoundError as error:
            say(error)
        try:
            await runner.run(len, [late.Thing()])
        except ModuleNotFoundError as error:
            say(error)
        import early
        await runner.run(early.old)
        with open("early.py", "a") as file:
            file.write("def new(): pass\\n")
        importlib.invalidate_caches()
        importlib.reload(early)
        try:
            await runner.run(early.new)
        except AttributeError as error:
            say(error)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_what_a_worker_cannot_import_comes_with_advice(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "late.py").write_text("class Thing: pass\ndef work(): pass\n")
    (tmp_path / "early.py").write_text("def old(): pass\n")
    first, second, third = output_of(_LATE_PATH, tmp_path, environment={"PYTHONDONTWRITEBYTECODE": "1"}).splitlines()
    for line in (first, second):
        assert line.startswith("ModuleNotFoundError|")
        assert "sys.path" in line
        assert "cloudpickle.register_pickle_by_value" in line
    assert third.startswith("AttributeError|")
    assert "importlib.reload" in third
