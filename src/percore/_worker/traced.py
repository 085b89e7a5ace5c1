"""Traced calls: the spans that a worker opens around the functions it runs, if the program traces its calls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from percore._common.tracing import Tracing
    from percore._worker.answers import Answers, Unpacked, WorkerFunction

Unpack = Callable[..., "Unpacked"]
"""`Answers.unpack`."""


async def traced(
    tracing: "Tracing", fn: Callable[..., Any], run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """Call and await `run`, which runs `fn`, and return its result."""
    with tracing.around(fn):
        return await (run(*args, **kwargs) if kwargs else run(*args))


def traced_plain(tracing: "Tracing", unpack: Unpack) -> Unpack:
    """Return an `unpack` for plain functions that are to be traced."""

    def unpacked(*call: Any) -> "Unpacked":
        fn, args, kwargs, gauges = unpack(*call)

        def run(*args: Any, **kwargs: Any) -> Any:
            with tracing.around(fn):
                return fn(*args, **kwargs)

        return run, args, kwargs, gauges

    return unpacked


@contextmanager
def traced_batch(
    tracing: "Tracing", answers: "Answers", function: "WorkerFunction", size: int, fn: Callable[..., Any]
) -> Iterator[Callable[..., Any]]:
    """Trace a batch of `size` calls of `function`. Yield `fn`, which makes these calls, so that it notes the errors of items."""
    try:
        named = answers.function(function)
    except BaseException:  # every item will fail with it
        yield fn
        return
    with tracing.around(named, size) as failed:

        def noting(*args: Any, **kwargs: Any) -> Any:
            try:
                return fn(*args, **kwargs)
            except BaseException as error:
                failed(error)
                raise

        yield noting
