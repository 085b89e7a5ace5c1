"""Several stories in one program: an interpreter and a fork server for each of them would take most of a test's time.

    STORIES = {"tasks left behind": Story("await runner.run(start)", "def start(): ...", "1, lifespan=session")}

    @pytest.fixture(scope="module")
    def told(tmp_path_factory):
        return tell(STORIES, tmp_path_factory.mktemp("stories"))

    def test_tasks_left_behind(told):
        assert told["tasks left behind"].out == ...

Each story has runners of its own, and a part of both outputs. One that raises has its traceback there, and the next one is told.
"""

import re
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.e2e.scripts import python

METHODS = ("forkserver", "spawn")
_HEADER = "\n== {}\n"


class Story(NamedTuple):
    """What a script does: `body` runs inside `async with percore.Runner(options) as runner`, after `definitions`."""

    body: str
    definitions: str = ""
    options: str = "2"
    methods: tuple[str, ...] = ("forkserver",)
    """It is told once with each of these start methods."""


class Told(NamedTuple):
    """What a story has written."""

    out: str
    err: str


def tell(stories: Mapping[str, Story], folder: Path, given: str = "") -> dict[str, Told]:
    """Run the program: what each story has written, by its name; "name, method" where it has several methods."""
    places = {}
    for number, (name, story) in enumerate(stories.items()):
        (folder / f"story_{number}.py").write_text(
            _MODULE.format(**story._asdict() | {"body": textwrap.indent(story.body, 8 * " ")})
        )
        for method in story.methods:
            places[name if len(story.methods) == 1 else f"{name}, {method}"] = f"story_{number} {method}"
    (folder / "program.py").write_text(_PROGRAM.format(places=[place.split() for place in places.values()], header=_HEADER))
    done = python("program.py", cwd=folder, given=given)
    assert done.code == 0, done
    out, err = _parts(done.out), _parts(done.err)
    return {name: Told(out[place], err[place]) for name, place in places.items()}


def _parts(text: str) -> dict[str, str]:
    _, *parts = re.split(r"\n== (story_\d+ \w+)\n", text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


_MODULE = """\
import asyncio
import contextlib
import os
import sys
import percore
{definitions}
async def tell(method):
    async with percore.Runner({options}, start_method=method) as runner:
{body}
"""

_PROGRAM = """\
import asyncio
import importlib
import sys
import traceback
import percore

async def main():
    async with percore.Runner(1):  # so the fork server stays from story to story
        for module, method in {places!r}:
            for stream in (sys.stdout, sys.stderr):
                print({header!r}.format(f"{{module}} {{method}}"), end="", file=stream, flush=True)
            try:
                await importlib.import_module(module).tell(method)
            except Exception:
                traceback.print_exc()

if __name__ == "__main__":
    asyncio.run(main())
"""
