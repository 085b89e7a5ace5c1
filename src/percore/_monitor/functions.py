"""The figures of functions: how often each was called, how long its calls waited and ran, and what pickling took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The distribution of a figure of calls. Half of them had at most `p50`, and all but one in a hundred at most `p99`.

    percore counts the figures in buckets of about 10 % width, so each percentile is that exact.

    Attributes:
        count: how many calls it stands for.
        p50: the median.
        p90: the 90th percentile.
        p99: the 99th percentile.
    """

    count: int
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Pickling:
    """What pickling the arguments and results of a function took, by side.

    The program dumps arguments and loads results; workers load arguments and dump results. Values that travel without pickling,
    such as numbers and short strings, do not count. Quick pickling is sampled: each sample stands for the calls since
    the one before.

    Attributes:
        dumps: how often the program has pickled arguments.
        dump_seconds: how long that took.
        loads: how often the program has unpickled results.
        load_seconds: how long that took.
        worker_loads: how often workers have unpickled arguments.
        worker_load_seconds: how long that took.
        worker_dumps: how often workers have pickled results.
        worker_dump_seconds: how long that took.
    """

    dumps: int = 0
    dump_seconds: float = 0.0
    loads: int = 0
    load_seconds: float = 0.0
    worker_loads: int = 0
    worker_load_seconds: float = 0.0
    worker_dumps: int = 0
    worker_dump_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """How long all of it took, on both sides."""
        return self.dump_seconds + self.load_seconds + self.worker_load_seconds + self.worker_dump_seconds


@dataclass(frozen=True, slots=True)
class FunctionStatistics:
    """The figures of all calls of one function: by `submit`, `run`, maps, streams, broadcasts, and from inside calls.

    The counts are exact, `begun == ended + running`, and outlive the workers. The distributions come from samples, which reach the
    program up to half a second late; all are None until there are some.

    A runner keeps figures of 1,024 names, those that it has met first. The calls of all further functions count in one record, with
    the name "(other functions)". Functions of one name share a record.

    Attributes:
        name: module and qualified name.
        begun: calls that have begun in a worker. Each item of a map counts; an attempt that another one follows does not.
        ended: calls that have begun and ended, including failures. A call cancelled before it began does not count.
        failed: calls that have ended with an exception or with the death of their worker. `ended` includes them.
        running: calls that run now. A batch of items of a map counts as one.
        wait: seconds from the call's acceptance to its begin in a worker. None also where the engine cannot tell the begin.
            A call of a LoopPoolExecutor that waits for room is accepted when there is room.
        run: seconds from the call's begin, before its arguments are unpickled, to its end. The items of a map that travel together
            count with their mean.
        payload: bytes of a pickle: of the arguments, of the result or of an item of a stream. Values that travel without pickling,
            such as numbers and short strings, do not count.
        pickling: what pickling arguments and results took.
        advice: what to do about it, if pickling takes longer than the work; else None.
    """

    name: str
    begun: int
    ended: int
    failed: int
    running: int
    wait: Percentiles | None
    run: Percentiles | None
    payload: Percentiles | None
    pickling: Pickling
    advice: str | None


@dataclass(frozen=True, slots=True)
class WorkerFunctionStatistics:
    """The figures of the calls of one function in one worker slot, by all workers that the slot has had.

    Attributes:
        name: module and qualified name.
        running: calls that run now, as far as `WorkerStatistics.running` counts them. A batch of items of a map counts as one.
        ended: calls that have begun and ended there, including failures. Each item of a map counts.
        failed: calls that have ended with an exception or with the death of their worker. `ended` includes them.
        run: seconds from the call's begin to its end, as in FunctionStatistics; None until there are samples.
    """

    name: str
    running: int
    ended: int
    failed: int
    run: Percentiles | None


@dataclass(frozen=True, slots=True)
class RunningCall:
    """A call that runs now.

    Attributes:
        name: module and qualified name of its function.
        seconds: for how long it has run; None if the engine cannot tell.
        id: tells it from the other calls of its worker. An id may repeat after very many calls.
    """

    name: str
    seconds: float | None
    id: int = 0
