"""Processes of percore that come up as slowly as a test likes: interpreters are held up before they get to any code of percore."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import Wire

_CUSTOMIZE = """\
import sys
if any("percore._worker" in argument for argument in sys.orig_argv):
    with open({held!r}, "wb", buffering=0) as held, open({gate!r}, "rb", buffering=0) as gate:
        held.write(b".\\n")
        gate.read(1)
"""


class Held:
    def __init__(self, held: Wire, gate: Wire) -> None:
        self._held = held
        self._gate = gate

    async def arrive(self, count: int) -> None:
        """Wait until so many more are held up."""
        await self._held.lines(count)

    def wait(self, count: int) -> None:
        """As `arrive`, where no loop runs."""
        asyncio.run(self.arrive(count))

    def let_go(self, count: int) -> None:
        self._gate.give(count)


@contextlib.contextmanager
def interpreters(folder: Path) -> Iterator[Held]:
    """Hold up those that programs start which are started meanwhile."""
    with contextlib.closing(Wire(folder / "held")) as held, contextlib.closing(Wire(folder / "gate")) as gate:
        (folder / "sitecustomize.py").write_text(_CUSTOMIZE.format(held=held.path, gate=gate.path))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(folder))
            yield Held(held, gate)
