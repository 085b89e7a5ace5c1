"""The engine of percore.testing, with the memory that jobs say their workers have."""

from collections.abc import Sequence

from percore._protocol.interfaces import Worker
from percore._testing import engine
from percore._testing.engine import FakeWorker
from percore.testing import FakeRunner as PublicFakeRunner
from tests.jobs import HOARDS

__all__ = ["FakeEngine", "FakeRunner", "FakeWorker"]


class FakeEngine(engine.FakeEngine):
    """An engine whose workers have the memory of their hoards."""

    async def memory(self, workers: Sequence[Worker], enough: int) -> list[int | None]:
        hoards = (HOARDS.get(worker.pid or 0, []) for worker in workers)
        return [2**20 + sum(map(len, hoard)) for hoard in hoards]


class FakeRunner(PublicFakeRunner):
    """A runner whose workers are fakes."""

    _make_engine = FakeEngine
