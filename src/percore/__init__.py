"""percore runs the functions of an asyncio program on every CPU.

A supervisor in your event loop starts one worker process per CPU. Each worker has its own event loop: coroutine functions run as
tasks in it, plain functions run on threads. Calls and results travel through shared memory.

    async with percore.Runner(lifespan=http) as runner:
        sizes = await runner.map(fetch, urls)

The package imports each public name on first use, so that a worker does not load the supervisor's modules.
"""

import gc
import sys
from importlib import import_module

TYPE_CHECKING = False  # as type checkers know it; importing typing would take most of the time that `import percore` takes

if sys.platform == "win32":
    raise ImportError(
        "percore runs on Linux and macOS, not on Windows, which lacks the file descriptors and signals that percore needs. "
        "On Windows, use WSL 2"
    )

if TYPE_CHECKING:
    from percore._common.errors import PayloadTooLarge, PercoreError, RemoteError, RemoteTraceback, RunnerClosed, RunnerFull
    from percore._common.rates import Rate
    from percore._common.worker_errors import RunnerBroken, StartupFailed, WorkerDied
    from percore._engines.threads.choice import ThreadsEngine
    from percore._executor.executor import LoopPoolExecutor
    from percore._map.map import Map
    from percore._map.threaded import threaded
    from percore._monitor.functions import FunctionStatistics, Percentiles, Pickling, RunningCall, WorkerFunctionStatistics
    from percore._monitor.progress import Progress
    from percore._monitor.statistics import Statistics, WorkerStatistics
    from percore._monitor.usage import ProcessUsage, Usage
    from percore._places.ray_engine import RayEngine
    from percore._protocol.shared import Shared
    from percore._runner.loop_watch import watch_loop
    from percore._runner.runner import Runner
    from percore._runner.stream import Stream
    from percore._runner.verbs import Options
    from percore._worker.context import CurrentWorker, current_worker, state
    from percore._worker.nested_maps import NestedMap
    from percore._worker.nested_streams import NestedStream
    from percore._worker.runner import CurrentRunner, current_runner

__all__ = [
    "CurrentRunner",
    "CurrentWorker",
    "FunctionStatistics",
    "LoopPoolExecutor",
    "Map",
    "NestedMap",
    "NestedStream",
    "Options",
    "PayloadTooLarge",
    "Percentiles",
    "PercoreError",
    "Pickling",
    "ProcessUsage",
    "Progress",
    "Rate",
    "RayEngine",
    "RemoteError",
    "RemoteTraceback",
    "Runner",
    "RunnerBroken",
    "RunnerClosed",
    "RunnerFull",
    "RunningCall",
    "Shared",
    "StartupFailed",
    "Statistics",
    "Stream",
    "ThreadsEngine",
    "Usage",
    "WorkerDied",
    "WorkerFunctionStatistics",
    "WorkerStatistics",
    "current_runner",
    "current_worker",
    "state",
    "threaded",
    "watch_loop",
]

__version__ = "0.1.0"

_NEVER = 2**31 - 1
"""More objects than an import makes: a threshold of `gc`."""

_HOMES = {
    "CurrentRunner": "_worker.runner",
    "CurrentWorker": "_worker.context",
    "FunctionStatistics": "_monitor.functions",
    "LoopPoolExecutor": "_executor.executor",
    "Map": "_map.map",
    "NestedMap": "_worker.nested_maps",
    "NestedStream": "_worker.nested_streams",
    "Options": "_runner.verbs",
    "PayloadTooLarge": "_common.errors",
    "Percentiles": "_monitor.functions",
    "PercoreError": "_common.errors",
    "Pickling": "_monitor.functions",
    "ProcessUsage": "_monitor.usage",
    "Progress": "_monitor.progress",
    "Rate": "_common.rates",
    "RayEngine": "_places.ray_engine",
    "RemoteError": "_common.errors",
    "RemoteTraceback": "_common.errors",
    "Runner": "_runner.runner",
    "RunnerBroken": "_common.worker_errors",
    "RunnerClosed": "_common.errors",
    "RunnerFull": "_common.errors",
    "RunningCall": "_monitor.functions",
    "Shared": "_protocol.shared",
    "StartupFailed": "_common.worker_errors",
    "Statistics": "_monitor.statistics",
    "Stream": "_runner.stream",
    "ThreadsEngine": "_engines.threads.choice",
    "Usage": "_monitor.usage",
    "WorkerDied": "_common.worker_errors",
    "WorkerFunctionStatistics": "_monitor.functions",
    "WorkerStatistics": "_monitor.statistics",
    "current_runner": "_worker.runner",
    "current_worker": "_worker.context",
    "state": "_worker.context",
    "threaded": "_map.threaded",
    "watch_loop": "_runner.loop_watch",
}


def _import_uncollected(name: str) -> object:
    """Import a module of percore without garbage collections meanwhile, and return it.

    Nearly everything that an import makes stays, so collections would find nothing, and look at all of it again and again.

    A threshold that is not reached keeps them off, and not `gc.disable`: another thread may call that, or `gc.enable`, meanwhile.
    """
    before = gc.get_threshold()
    gc.set_threshold(_NEVER, *before[1:])
    try:
        return import_module(name)
    finally:
        if gc.get_threshold()[0] == _NEVER:  # otherwise another thread has set one meanwhile
            gc.set_threshold(*before)


if not TYPE_CHECKING:  # with a __getattr__, type checkers would accept any name

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_import_uncollected(f"{__name__}.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
