"""The rules by which a page's blocks run, on small pages."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.blocks import blocks_of, new_side
from tests.docs.console import commands_of, matches
from tests.docs.story import Failed, Story

Run = Callable[[str], None]

HELLO = """
```python title="hello.py"
print("hello", 1)
```
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(text: str) -> None:
        page, folder = tmp_path / "page.md", tmp_path / "folder"
        page.write_text(text)
        folder.mkdir()
        Story(page, folder).run()

    return run


@pytest.mark.parametrize(
    "text",
    [
        HELLO + "```console\n$ python hello.py\nhello 1\n```",
        HELLO + "```console\n$ python hello.py\nhel...1\n$ python hello.py\n...\n```",
        HELLO + '```python title="hello.py"\nprint("other")\n```\n```console\n$ python hello.py\nother\n```',
        HELLO + "```console\n$ python \\\n    hello.py\nhello 1\n```",
        '```toml title="a/b.toml"\nx = 1\n```\n```console\n$ cat a/b.toml\nx = 1\n```',
        "```console\n$ python -c '1/0'\nTraceback (most recent call last):\n...\nZeroDivisionError: division by zero\n```",
        "```console\n$ python -m pip install 'percore[test]' pytest\n```",
        "<!-- skip: needs a network -->\n```console\n$ false\n```",
        "```python\nprint(1)\nprint(2)\n```\n\n```text\n1\n2\n```",
    ],
    ids=["output", "any", "replaced", "continued", "folder", "error", "install", "skip", "untitled"],
)
def test_a_page_that_tells_the_truth_passes(run: Run, text: str) -> None:
    run(text)


@pytest.mark.parametrize(
    "text",
    [
        HELLO + "```console\n$ python hello.py\nhello 2\n```",
        HELLO + "```console\n$ python hello.py\n```",
        "```console\n$ python hello.py\n...\n```",
        "```console\n$ python -m pip install no-such-package\n```",
        "```console\n$ sleep 60 &\n```",
        "```console\n$ false --port 8000 &\n```",
        "```python\nx = missing\n```",
        "```pycon\n>>> 1 + 1\n3\n```",
        "```python\nimport os; os._exit(1)\n```",
        "```python\nprint(1)\n```\n\n```text\n2\n```",
        "```python\nprint(1)\n```",
    ],
    ids=[
        *("wrong output", "no output", "missing file", "not installed", "no port", "dead server", "name", "doctest", "end"),
        *("wrong untitled output", "untitled output that is not shown"),
    ],
)
def test_a_page_that_does_not_fails(run: Run, text: str) -> None:
    with pytest.raises((Failed, ImportError)):
        run(text)


def test_untitled_blocks_share_a_namespace_and_may_await(run: Run) -> None:
    run("""
<!-- prelude
import asyncio
number = 3
-->

    ```python
    def half() -> float:
        return number / 2

    assert await asyncio.sleep(0, half()) == 1.5
    ```

```python
assert half() == 1.5
```

```pycon
>>> def third(number):
...     return number / 3
>>> third(6)
2.0
```
""")


def test_functions_of_untitled_blocks_run_in_workers(run: Run) -> None:
    run("""
```python
import percore

def double(number):
    return 2 * number

async with percore.Runner(workers=1) as runner:
    assert await runner.run(double, 4) == 8
```
""")


def test_a_server_runs_until_the_end_of_the_page_on_a_free_port(run: Run) -> None:
    run("""
```python title="get.py"
from urllib.request import urlopen
print(urlopen("http://127.0.0.1:8000/hello.txt").status)
```

```text title="hello.txt"
hello
```

```console
$ python -um http.server 8000 --bind 127.0.0.1 &
Serving HTTP on 127.0.0.1 port 8000 ...
$ python get.py
200
```

```python
from urllib.request import urlopen
assert urlopen("http://127.0.0.1:8000/hello.txt").read() == b"hello\\n"
```
""")


def test_an_exported_variable_is_set_for_the_commands_that_follow(run: Run) -> None:
    run("""
```console
$ export GREETING=hello NAME=world
$ printenv GREETING NAME
hello
world
```
""")


def test_the_line_of_a_block_is_that_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\none\n```\n\n- item\n\n  ```pycon\n  >>> 1\n  ```\n")
    assert [(block.line, block.language, block.text) for block in blocks_of(page)] == [
        (4, "python", "one\n"),
        (10, "pycon", ">>> 1\n"),
    ]


def test_any_lines_and_any_text() -> None:
    assert matches(["a", "...", "d"], "a\nb\nc\nd\n")
    assert matches(["a", "...", "d"], "a\nd\n")
    assert matches(["took ... s"], "took 1.5 s\n")
    assert matches([], "")
    assert not matches(["a", "...", "d"], "a\nb\n")
    assert not matches(["took ... s"], "took 1.5 ms\n")
    assert not matches(["a.c"], "abc\n")
    assert not matches(["a"], "a\nb\n")
    assert matches(["a"], "a\nb\n", start=True)


def test_output_without_a_command_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="without a command"):
        list(commands_of("hello\n"))


def test_the_new_side_of_a_diff() -> None:
    assert new_side("@@ -1 +1 @@\n x = 1\n-y = 1\n+y = 2\n") == "x = 1\ny = 2"
