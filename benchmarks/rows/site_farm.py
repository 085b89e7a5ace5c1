"""The crawler of the examples on the local farm of sites: one plain process against percore with two workers.

`examples/scrape.py` in both of its ways, for a few seconds each: pages fetched over HTTP, parsed, their links followed, with
the same manners. The farm serves from the same two CPUs, and what it takes there the crawler cannot have: of the time that
the two workers' crawl takes, the farm's share of both CPUs is taken off. One process leaves the farm a CPU of its own.
"""

from __future__ import annotations

import argparse
import importlib
import io
import sys
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._figures import Target
from benchmarks._harness import Round, Row, Sample
from benchmarks._pinning import Pin

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

_EXAMPLES = Path(__file__).parents[2] / "examples"
CPUS = 2
EXCLUDED = "a page, farm excluded"


def row(*, quick: bool) -> Row:
    seconds = 1.5 if quick else 6.0
    farm = OneFarm(**({"modules": 10, "releases": 1, "slow": 0.2} if quick else {"slow": 0.2}))
    return Row(
        contestants={
            "one process": partial(_crawl, farm, seconds, single=True),
            "percore, 2 workers": partial(_crawl, farm, seconds, single=False),
        },
        targets=[Target("percore, 2 workers", "one process", EXCLUDED, at_least=0.9 * CPUS)],
        rounds=3 if quick else 5,
        seconds=8 if quick else 75,
        warm_ups=0,
        pin=Pin.TWO,
    )


class OneFarm:
    """A farm for all contestants, from the first that opens to the last that closes: rendering its pages takes a while."""

    def __init__(self, **sizes: float) -> None:
        self._sizes = sizes
        self._users = 0
        self._farm: Any = None

    @contextmanager
    def used(self) -> Iterator[Any]:
        if not self._users:
            self._farm = _examples()[0].Farm(**self._sizes)
        self._users += 1
        try:
            yield self._farm
        finally:
            self._users -= 1
            if not self._users:
                self._farm.close()


@asynccontextmanager
async def _crawl(one_farm: OneFarm, seconds: float, *, single: bool) -> AsyncIterator[Round]:
    _, scrape = _examples()
    with one_farm.used() as farm:

        async def once() -> Sample:
            farm.forget()
            scraper = scrape.Scraper(_options(seconds), scrape.Console(file=io.StringIO()), None)
            tally = scrape.Tally("one crawl")
            scraper.tallies.append(tally)
            await (scraper.in_one_process if single else scraper.on_every_cpu)(farm.starts, tally)
            if not tally.pages:
                raise RuntimeError("no page was crawled")
            farm_share = 0.0 if single else farm.usage().cpu / CPUS
            return {EXCLUDED: (tally.seconds - farm_share) / tally.pages, "a page": tally.seconds / tally.pages}

        yield once


def _examples() -> tuple[Any, Any]:
    """The modules farm and scrape, which are a program's and not a package's."""
    if str(_EXAMPLES) not in sys.path:
        sys.path.append(str(_EXAMPLES))  # the workers' too: percore hands it on
    return importlib.import_module("farm"), importlib.import_module("scrape")


def _options(seconds: float) -> argparse.Namespace:
    return argparse.Namespace(
        per_host=2,
        retries=3,
        backoff=0.5,
        timeout=10.0,
        workers=CPUS,
        concurrency=100,
        depth=3,
        seconds=seconds,
        follow_hosts=False,
    )
