"""Every way to start a Python program, by its real command: what lives in its `__main__` works in workers and comes back."""

import json
import os
import pty
import re
import subprocess
import sys
import zipapp
from collections.abc import Callable
from pathlib import Path

import pytest

from percore._common.system import IS_FREE_THREADED
from tests.e2e.scripts import TIMEOUT, Done, output_of, python
from tests.rows import repeated_rows, repeats

SENTENCE = "starts percore when a worker imports it: put the start under `if __name__ == '__main__':`"
both_methods = pytest.mark.parametrize("method", ["forkserver", "spawn"])

DEFINITIONS = """\
import asyncio
import dataclasses
import enum
import functools
import json
import os
from contextlib import asynccontextmanager

import percore

FACTOR = 3


@dataclasses.dataclass(frozen=True)
class Point:
    x: int

    def moved(self, by):
        return Point(self.x + by)

    @classmethod
    def origin(cls):
        return cls(0)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Oops(Exception):
    def __init__(self, text, point):
        super().__init__(text, point)
        self.point = point


class Adder:
    def __init__(self, by):
        self.by = by

    def __call__(self, n):
        return n + self.by


def helper(n):
    return n * FACTOR


def scale(n):
    return helper(n)


async def move(point, by):
    await asyncio.sleep(0)
    assert isinstance(point, Point), type(point)
    return point.moved(by)


def other(color):
    assert color is Color.RED, color
    return Color.BLUE


def give_class():
    return Point


def fail(point):
    try:
        {}["missing"]
    except KeyError as error:
        raise Oops("no", point) from error


@asynccontextmanager
async def session():
    yield Point(100)


def from_state(n):
    return percore.state(Point).moved(n)


async def tell():
    seen = {}
    ten = 10
    def inner(n):
        return helper(n) + ten
    async with percore.Runner(2, lifespan=session, start_method=os.environ["METHOD"]) as runner:
        moved = await runner.run(move, Point(1), by=2)
        seen["coroutine function"] = moved == Point(3) and type(moved) is Point
        seen["map"] = await runner.map(scale, range(4)) == [0, 3, 6, 9]
        seen["map of objects"] = await runner.map(move, [Point(1), Point(2)], [1, 1]) == [Point(2), Point(3)]
        seen["lambda"] = await runner.run(lambda n: helper(n) + ten, 2) == 16
        seen["lambda that makes an object"] = type(await runner.run(lambda: Point(1))) is Point
        seen["closure"] = await runner.run(inner, 3) == 19
        seen["method"] = await runner.run(Point(1).moved, 5) == Point(6)
        seen["class method"] = await runner.run(Point.origin) == Point(0)
        seen["partial"] = await runner.run(functools.partial(scale, n=4)) == 12
        seen["callable object"] = await runner.run(Adder(5), 1) == 6
        seen["class as a function"] = await runner.run(Point, 9) == Point(9)
        seen["class as a result"] = await runner.run(give_class) is Point
        seen["class as an argument"] = await runner.run(isinstance, Point(1), Point)
        seen["function as a result"] = (await runner.run(lambda: scale))(2) == 6
        seen["enum"] = await runner.run(other, Color.RED) is Color.BLUE
        seen["inside containers"] = await runner.run(dict, a=[Point(1)]) == {"a": [Point(1)]}
        seen["lifespan"] = await runner.run(from_state, 1) == Point(101)
        try:
            await runner.run(fail, Point(7))
        except Oops as error:
            seen["exception"] = type(error) is Oops and error.args == ("no", Point(7)) and error.point == Point(7)
            seen["its cause"] = type(error.__cause__) is KeyError
            seen["its traceback"] = "in fail" in str(error.__cause__.__cause__)
    print(json.dumps(seen))
"""
STORY = f'{DEFINITIONS}\n\nif __name__ == "__main__":\n    asyncio.run(tell())\n'
AT_PROMPT = "\nasyncio.run(tell())\n"

Style = Callable[[Path], Done]


def script(folder: Path) -> Done:
    (folder / "app.py").write_text(STORY)
    return python("app.py", cwd=folder)


def script_from_elsewhere(folder: Path) -> Done:
    """By a relative path, in a program that changes its directory before it starts."""
    (folder / "app.py").write_text(STORY.replace("    asyncio.run", '    os.chdir("/")\n    asyncio.run'))
    (folder / "beside").mkdir()
    return python("../app.py", cwd=folder / "beside")


def safe_path(folder: Path) -> Done:
    (folder / "app.py").write_text(STORY)
    return python("-P", "-s", "app.py", cwd=folder)


def module(folder: Path) -> Done:
    (folder / "app.py").write_text(STORY)
    return python("-m", "app", cwd=folder)


def module_of_package(folder: Path) -> Done:
    """Its relative imports work in workers too."""
    (folder / "parts").mkdir()
    (folder / "parts" / "__init__.py").touch()
    (folder / "parts" / "numbers.py").write_text("FACTOR = 3\n")
    (folder / "parts" / "app.py").write_text(STORY.replace("FACTOR = 3", "from .numbers import FACTOR"))
    return python("-m", "parts.app", cwd=folder)


def package(folder: Path) -> Done:
    (folder / "parts").mkdir()
    (folder / "parts" / "__init__.py").touch()
    (folder / "parts" / "__main__.py").write_text(STORY)
    return python("-m", "parts", cwd=folder)


def command(folder: Path) -> Done:
    return python("-c", STORY, cwd=folder)


def stdin(folder: Path) -> Done:
    return python(cwd=folder, given=STORY)


def stdin_by_dash(folder: Path) -> Done:
    return python("-", cwd=folder, given=STORY)


def zip_application(folder: Path) -> Done:
    (folder / "source").mkdir()
    (folder / "source" / "__main__.py").write_text(STORY)
    zipapp.create_archive(folder / "source", folder / "app.pyz")
    return python("app.pyz", cwd=folder)


def directory(folder: Path) -> Done:
    (folder / "source").mkdir()
    (folder / "source" / "__main__.py").write_text(STORY)
    return python("source", cwd=folder)


def prompt(folder: Path) -> Done:
    return without_prompts(python("-q", "-i", cwd=folder, given=as_typed(DEFINITIONS + AT_PROMPT)))


def prompt_of_asyncio(folder: Path) -> Done:
    # From 3.13 on this prompt takes blocks of several lines from a terminal only.
    definitions = DEFINITIONS if sys.version_info < (3, 13) else f"exec({DEFINITIONS!r})"
    done = without_prompts(python("-m", "asyncio", cwd=folder, given=as_typed(f"{definitions}\nawait tell()\n")))
    greeting = r'asyncio REPL .*\nUse "await" .*\nType .*\nimport asyncio\n(exiting asyncio REPL\.\.\.)?'
    prompts = re.compile(r">>> |\.\.\. ")  # where there is no terminal, these come on standard output
    return done._replace(out=prompts.sub("", done.out), err=re.sub(greeting, "", done.err))


def prompt_after_script(folder: Path) -> Done:
    """A name that the prompt gives anew is no longer the script's."""
    (folder / "app.py").write_text(DEFINITIONS.replace("FACTOR = 3", "FACTOR = 1"))
    return without_prompts(python("-i", "app.py", cwd=folder, given=as_typed(f"FACTOR = 3{AT_PROMPT}")))


def as_typed(source: str) -> str:
    """As a person types it at a prompt: a blank line ends a block and is nowhere else."""
    lines = [line for line in source.splitlines() if line]
    follows = zip(["", *lines], lines, strict=False)
    return "\n".join(f"\n{line}" if before[:1] == " " != line[:1] else line for before, line in follows) + "\n\n"


def without_prompts(done: Done) -> Done:
    return done._replace(err=re.sub(r">>> |\.\.\. |^\n", "", done.err, flags=re.MULTILINE).removesuffix("\n"))


BY_REFERENCE: list[Style] = [script, script_from_elsewhere, safe_path, module, module_of_package]
BY_VALUE: list[Style] = [
    package,
    command,
    stdin,
    zip_application,
    prompt,
    prompt_of_asyncio,
    prompt_after_script,
]
# The others differ in nothing that a start method could matter to.
WITH_SPAWN: list[Style] = [script, package]
REPEATS: list[Style] = [module_of_package, command, zip_application]
# To Python, these are the standard input and the zip file once more.
ALIKE: list[Style] = [stdin_by_dash, directory]


@pytest.mark.parametrize(
    ("method", "style"),
    [
        *(("forkserver", style) for style in BY_REFERENCE + BY_VALUE),
        *(("spawn", style) for style in WITH_SPAWN),
        *repeated_rows(*(("forkserver", style) for style in ALIKE), *(("spawn", style) for style in REPEATS)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_s8_what_lives_in_main_travels(method: str, style: Style, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METHOD", method)
    done = style(tmp_path)
    assert (done.code, done.err) == (0, ""), done
    seen = json.loads(done.out)
    assert [name for name, fine in seen.items() if not fine] == []
    assert len(seen) == 20


def test_s8_a_prompt_on_a_terminal(tmp_path: Path) -> None:
    typed = as_typed(
        """
import asyncio, percore
def double(n):
    print("working", flush=True)
    return 2 * n
async def main():
    async with percore.Runner(1) as runner:
        print("got", await runner.run(double, 21))
asyncio.run(main())
def double(n):
    return 3 * n
asyncio.run(main())
raise SystemExit(7)
"""
    )
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-q"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=tmp_path,
            env={**os.environ, "TERM": "dumb", "PYTHON_BASIC_REPL": "1"},
            start_new_session=True,
        )
        os.close(theirs)
        os.write(ours, typed.encode())
        shown = read_terminal(ours)
    finally:
        os.close(ours)
    assert process.wait(TIMEOUT) == 7, shown
    assert "Traceback" not in shown
    assert [line for line in shown.splitlines() if re.fullmatch(r"working|got \d+", line)] == ["working", "got 42", "got 63"], shown


def read_terminal(fd: int) -> str:
    """Everything that is shown until the last program on it has ended."""
    shown = b""
    while True:
        try:
            shown += os.read(fd, 65536)
        except OSError:  # EIO: nobody has it open any more
            return shown.decode()


# The guard


COUNTED = """\
with open("starts", "a") as file:
    file.write("x")
"""
LISTENING = """\
import asyncio
import percore

async def main():
    async with percore.Runner(2) as runner:
        print(await runner.run(double, 4))
        print(await runner.map(lambda n: double(n), range(3)))
"""


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text())


@both_methods
def test_s8_a_script_whose_functions_live_elsewhere_needs_no_guard(method: str, tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("def double(n):\n    return 2 * n\n")
    text = f"{COUNTED}from work import double\n{LISTENING.replace('(2)', f'(2, start_method={method!r})')}asyncio.run(main())\n"
    assert output_of(text, tmp_path) == "8\n[0, 2, 4]\n"
    assert starts(tmp_path) == 1


@pytest.mark.parametrize(
    ("definition", "host"),
    [
        ("def", "asyncio.run(main())"),
        ("async def", "import uvloop; uvloop.run(main())"),
        *repeated_rows(("def", "import uvloop; uvloop.run(main())"), ("async def", "asyncio.run(main())")),
    ],
    ids=["def-asyncio", "async-uvloop", "def-uvloop", "async-asyncio"],
)
def test_s8_a_missing_guard_is_told_on_the_terminal(definition: str, host: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(f"{COUNTED}{LISTENING}\n{definition} double(n):\n    return 2 * n\n\n{host}\n")
    done = python("app.py", cwd=tmp_path)
    assert done.code == 1
    *_, last = done.err.splitlines()
    assert last == f"ImportError: your script {str(tmp_path / 'app.py')!r} {SENTENCE}"
    remote, _, _ = done.err.partition("The above exception")
    assert re.findall(r'File "(.*)", line', remote) == [str(tmp_path / "app.py")]  # the line that needs the guard
    assert done.err.count("The above exception") == 1
    assert done.out == ""
    assert starts(tmp_path) == 2  # here, and in the one worker that looked for the function


def test_s8_a_missing_guard_is_told_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(f"{COUNTED}{LISTENING}\ndef double(n):\n    return 2 * n\n\nasyncio.run(main())\n")
    done = python("-m", "app", cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert f"ImportError: your module 'app' {SENTENCE}" in done.err
    assert starts(tmp_path) == 2


@both_methods
def test_s8_a_missing_guard_of_a_lifespan_fails_the_start_once(method: str, tmp_path: Path) -> None:
    text = f"""\
{COUNTED}
import asyncio
import contextlib
import percore

@contextlib.asynccontextmanager
async def session():
    yield 1

async def main():
    async with percore.Runner(2, lifespan=session, start_method={method!r}):
        print("started")

asyncio.run(main())
"""
    (tmp_path / "app.py").write_text(text)
    done = python("app.py", cwd=tmp_path)
    assert (done.code, done.out) == (1, "")
    assert SENTENCE in done.err
    assert re.search(r"^percore\.StartupFailed: ", done.err, re.MULTILINE)
    assert starts(tmp_path) <= 3


def test_s8_calls_that_wait_for_an_unguarded_script_all_get_the_sentence(tmp_path: Path) -> None:
    text = f"""\
{COUNTED}
import asyncio
import percore

def double(n):
    return 2 * n

async def main():
    async with percore.Runner(2) as runner:
        errors = await runner.map(double, range(50), return_exceptions=True)
        print(sum({SENTENCE!r} in str(error) for error in errors), {{type(error).__name__ for error in errors}})
        print(await runner.run(abs, -3))

asyncio.run(main())
"""
    assert output_of(text, tmp_path) == "50 {'ImportError'}\n3\n"
    assert starts(tmp_path) == 3


@both_methods
def test_s8_a_guarded_script_runs_once_in_a_worker_and_only_when_it_is_needed(method: str, tmp_path: Path) -> None:
    text = f"""\
{COUNTED}
import asyncio
import percore

def double(n):
    return 2 * n

async def main():
    async with percore.Runner(1, start_method={method!r}) as runner:
        print(await runner.run(abs, -3), len(open("starts").read()))
        print(await runner.run(double, 4), len(open("starts").read()))
        print(await runner.map(double, range(3)), len(open("starts").read()))

if __name__ == "__main__":
    asyncio.run(main())
"""
    assert output_of(text, tmp_path) == "3 1\n8 2\n[0, 2, 4] 2\n"


@both_methods
def test_s8_a_module_that_has_changed_since_the_program_imported_it(method: str, tmp_path: Path) -> None:
    """The program has one version, its workers the next: what the two do not share fails its own call, in words."""
    text = f"""\
import asyncio
import pathlib
import percore

file = pathlib.Path("shop.py")
file.write_text("def price(n): return n\\ndef gone(n): return n\\nclass Item: pass\\nclass Gone: pass\\n")
import shop

file.write_text("def price(n): return n + 100\\nclass Item: pass\\nclass New: pass\\ndef make(): return New()\\n")
shop.make = lambda: None
shop.make.__module__, shop.make.__qualname__ = "shop", "make"

async def outcome(runner, fn, *args):
    try:
        return await runner.run(fn, *args)
    except Exception as error:
        return type(error).__name__, "shop" in str(error)

async def main():
    async with percore.Runner(1, start_method={method!r}) as runner:
        print(await outcome(runner, shop.price, 1))
        print(await outcome(runner, shop.gone, 1))
        print(await outcome(runner, len, [shop.Gone()]))
        print(await outcome(runner, shop.make))
        print(await outcome(runner, len, [shop.Item()]), runner.statistics().restarts)

if __name__ == "__main__":
    asyncio.run(main())
"""
    told = output_of(text, tmp_path).splitlines()
    assert told == ["101", "('AttributeError', True)", "('AttributeError', True)", "('RemoteError', True)", "1 0"]


# Notebooks


NOTEBOOK_DRIVER = """\
import json
import sys

import nbclient
import nbformat

cells = [nbformat.v4.new_code_cell(source) for source in json.load(sys.stdin)]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=30, kernel_name="python3").execute()
told = []
for cell in notebook.cells:
    texts = {"stdout": "", "stderr": ""}
    for output in cell.outputs:
        texts[output.name] += output.text
    told.append(texts)
print(json.dumps(told))
"""


def run_notebook(cells: list[str], folder: Path) -> list[dict[str, str]]:
    """What each cell printed. Nothing is read from or left in the home of whoever runs the tests."""
    private = {
        name: folder / "home" / name
        for name in ("HOME", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    }
    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context():
        monkeypatch.delenv("PYTEST_CURRENT_TEST")  # which tells a kernel to leave the standard output of its process alone
        done = python("-c", NOTEBOOK_DRIVER, cwd=folder, given=json.dumps(cells), environment=private)
    assert done.code == 0, done.err
    told: list[dict[str, str]] = json.loads(done.out.splitlines()[-1])  # before it, the kernel's own standard output
    assert [texts["stderr"] for texts in told] == [""] * len(cells), told
    return told


BAR = """\
import contextlib, io
with contextlib.redirect_stderr(io.StringIO()) as bar:
    await runner.map(scale, [1] * 50, progress=True)
print('50/50' in bar.getvalue())
"""


LAST_WORDS = """\
import os, sys
noted, write = [], sys.stdout.write
def note(text):
    write(text)
    noted.append(text)
    return len(text)
sys.stdout.write = note
await runner.run(print, 'from a worker')
await runner.aclose()
_ = os.write(1, b'from the kernel\\n')
"""
UNTIL_NOTED = """\
while 'from the kernel\\n' not in ''.join(noted):
    await asyncio.sleep(0.01)
"""
"""Waits until the kernel's thread has read what was printed to its descriptor. With a later cell it would not be shown."""


@pytest.mark.parametrize("method", ["forkserver", *repeats("spawn")])
def test_s8_a_notebook(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("METHOD", method)
    told = run_notebook(
        [
            DEFINITIONS,
            "await tell()",
            "runner = percore.Runner(2)\nawait runner.start()",
            "def name():\n    return 'first'\nprint(await runner.run(name), type(await runner.run(Point, 1)) is Point)",
            "def name():\n    return 'second'\nprint(await runner.run(name))",
            "FACTOR = 5\nprint(await runner.map(scale, [1, 2]))",
            "class Point:\n    pass\nprint(type(await runner.run(Point)) is Point)",
            "try:\n    await runner.run(fail, Point())\nexcept Oops as error:\n    print(type(error.point) is Point)",
            BAR,
            "print('text/html' in get_ipython().display_formatter.format(runner.statistics())[0])",
            LAST_WORDS if IS_FREE_THREADED else LAST_WORDS + UNTIL_NOTED,
            "left_open = await percore.Runner(1).__aenter__()\nprint(await left_open.run(name))",
        ],
        tmp_path,
    )
    seen = json.loads(told[1]["stdout"])
    assert [name for name, fine in seen.items() if not fine] == []
    # The kernel reads what workers print from a pipe, in a thread. Without a GIL it shows nothing that was written to a descriptor,
    # not even its own.
    shown = [texts["stdout"] for texts in told[2:]]
    assert "".join(shown).count("from a worker\n") == "".join(shown).count("from the kernel\n") == (not IS_FREE_THREADED)
    assert [text.replace("from a worker\n", "").replace("from the kernel\n", "") for text in shown] == [
        "",
        "first True\n",
        "second\n",
        "[5, 10]\n",
        "True\n",
        "True\n",
        "True\n",
        "True\n",
        "",
        "second\n",
    ]
