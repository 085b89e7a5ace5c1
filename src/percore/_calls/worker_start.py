"""Makes what the workers of any engine are started with, from the options of their runner."""

from typing import Any

from percore._common.options import RunnerOptions, usable_cpus
from percore._common.system import metrics_wanted
from percore._protocol.interfaces import Store
from percore._protocol.worker_start import ExecutorSettings, Given, WorkerStart
from percore._scheduler.places import places_for, room_of
from percore._serialization.advice import blamed, unsendable, unsendable_function
from percore._serialization.pickler import CANNOT


def places_of(options: RunnerOptions) -> int:
    """Return how many start marks each worker of a runner has: a power of two, at least the number of calls it may hold at once.

    An engine needs this before `start_of`, which pickles into its store: the store and the marks lie in the same memory.
    """
    return places_for(room_of(options.concurrency, options.threads))


def start_of(options: RunnerOptions, store: Store, executor: ExecutorSettings | None = None) -> WorkerStart:
    """Make the start data that all workers of a runner share. `Engine.start` sets index and generation.

    Raises:
        ValueError: workers cannot find one of the context variables.
        Exception: lifespan or thread_initializer cannot be pickled.
    """
    return WorkerStart(
        index=0,
        generation=0,
        threads=options.threads,
        lifespan=pickled_option("lifespan", options.lifespan, store),
        thread_initializer=pickled_option("thread_initializer", options.thread_initializer, store),
        contextvars=_references(options),
        tracing=b"" if options.tracing is None else store.pickled(options.tracing),
        executor=executor,
        is_measured=metrics_wanted(),
        has_spare=options.workers < usable_cpus(),
    )


def _references(options: RunnerOptions) -> tuple[tuple[str, str], ...]:
    if not options.contextvars:
        return ()
    from percore._calls.context_variables import references  # few runners have any

    return references(options.contextvars)


def pickled_option(option: str, value: Any, store: Store) -> bytes:
    """Pickle the value of an option of the runner. The error names the option."""
    if value is None:
        return b""
    try:
        return store.pickled(value)
    except CANNOT as error:
        failure = unsendable_function(option, error, "make in it what cannot be sent")
    raise failure


def pickled_initializer(given: Given, store: Store) -> bytes:
    """Pickle the initializer of an executor. The error names it, or the argument that cannot be pickled."""
    initializer, initargs = given
    assert initializer is not None
    try:
        return store.pickled(given)
    except CANNOT as error:
        if not store.can_pickle(initializer):
            failure = unsendable_function("initializer", error)
        else:
            what, value = blamed(initializer, initargs, {}, store.can_pickle)
            failure = unsendable(f"initargs: {what}", value, error)
    raise failure
