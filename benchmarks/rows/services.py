"""Calls through services: schedulers of clusters, a web server's pool, and queues on Redis."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from benchmarks.calls import same, same_plainly
from benchmarks.contestants import await_all, by_calls, percore_call, playing, timed
from benchmarks.figures import latencies
from benchmarks.harness import Row, row
from benchmarks.peers import WORKERS
from benchmarks.peers.clusters import dask_actor_calling, dask_calling, ray_actor_calling, ray_calling
from benchmarks.peers.services import dirty_calling, streaq_calling, taskiq_calling

if TYPE_CHECKING:
    from benchmarks.harness import Contestant
    from benchmarks.peers import Call, OpenCall
    from benchmarks.results import Sample

CALLS = 5
"""Calls of each of the 100 awaiters, one after the other."""

FEW = frozenset({"taskiq", "streaq"})
"""Services whose calls take so long that each awaiter makes one."""


@row(rounds=3, seconds=40, warm_ups=0)
def services(quick: bool) -> Row:
    """A no-op, one call at a time and by 100 awaiters, beside services that run calls on this machine. 2 workers.

    Ray and Dask send a task through a scheduler, which could also choose another machine; calls of their actors go to a worker
    directly. gunicorn's dirty arbiter runs calls for the processes that answer requests, in processes that stay. taskiq and streaq
    put calls into Redis. What is not installed is left out: `apt install redis-server` and `python -m pip install ray distributed
    taskiq taskiq-redis streaq`.
    """

    def contestant(name: str, opening: OpenCall) -> Contestant:
        async def once(call: Call) -> Sample:
            for number in range(2 if name in FEW else 20):
                await call(number)
            alone = latencies([await timed(call, number) for number in range(10 if quick or name in FEW else 50)])
            return {
                "one call": alone["p50"],
                "of 100 awaiters": await by_calls(await_all([call] * 100, 1 if name in FEW else CALLS)),
            }

        return playing(opening, once)

    peers: dict[str, dict[str, OpenCall]] = {
        "Ray, tasks": {"": partial(ray_calling, WORKERS, same_plainly)},
        "Ray, actors": {"": partial(ray_actor_calling, WORKERS, same)},
        "Dask, tasks": {"": partial(dask_calling, WORKERS, same_plainly)},
        "Dask, actors": {"": partial(dask_actor_calling, WORKERS, same_plainly)},
        "gunicorn, dirty arbiter": {f"{n} threads": partial(dirty_calling, WORKERS, n) for n in (1, 4, 16)},
        "taskiq": {f"every {s * 1000:g} ms": partial(taskiq_calling, WORKERS, s) for s in (0.002, 0.01, 0.05)},
        "streaq": {"": partial(streaq_calling, WORKERS)},
    }
    return Row(
        {
            "percore, coroutine": contestant("percore", partial(percore_call, same, workers=WORKERS)),
            "percore, plain function": contestant("percore", partial(percore_call, same_plainly, workers=WORKERS)),
            **{
                name: contestant(name, some[""]) if "" in some else {said: contestant(name, one) for said, one in some.items()}
                for name, some in peers.items()
            },
        }
    )
