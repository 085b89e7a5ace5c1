"""Functions for workers that are traced by OpenTelemetry, and the spans that a process has ended."""

import os
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from opentelemetry import baggage, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

import percore


class _Kept(SpanExporter):
    """Keeps spans until they are taken, one by one: with the SDK's own exporter those that end meanwhile would be lost."""

    def __init__(self) -> None:
        self.spans: deque[ReadableSpan] = deque()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans.extend(spans)
        return SpanExportResult.SUCCESS


_exporter = _Kept()


class Span(NamedTuple):
    name: str
    kind: str
    trace: int
    id: int
    parent: int | None
    attributes: dict[str, Any]
    status: str
    events: list[str]
    pid: int


def export_here() -> None:
    """Export the spans of this process, from now on, to its memory."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(_exporter))
        trace.set_tracer_provider(provider)


@contextmanager
def exporting() -> Iterator[None]:
    export_here()
    yield


def ended() -> list[Span]:
    """The spans that this process has ended and that were not asked for before."""
    taken: list[ReadableSpan] = []
    with suppress(IndexError):  # there are no more
        while True:
            taken.append(_exporter.spans.popleft())
    return [_told(span) for span in taken]


def _told(span: ReadableSpan) -> Span:
    context = span.context
    parent = None if span.parent is None else span.parent.span_id
    events = [str((event.attributes or {}).get("exception.type", event.name)) for event in span.events]
    attributes = dict(span.attributes or {})
    name, kind, status = span.name, span.kind.name, span.status.status_code.name
    return Span(name, kind, context.trace_id, context.span_id, parent, attributes, status, events, os.getpid())


def own(name: str) -> Any:
    """A span of the user."""
    return trace.get_tracer("tests").start_as_current_span(name)


async def adown(depth: int) -> Any:
    with own(f"own {depth}"):
        return await percore.current_runner().run(down, depth - 1) if depth else baggage.get_baggage("who")


def down(depth: int) -> Any:
    with own(f"own {depth}"):
        return percore.current_runner().run_sync(adown, depth - 1) if depth else baggage.get_baggage("who")


def plain(number: int) -> int:
    with own("own"):
        return number


async def coroutine(number: int) -> int:
    return plain(number)


def generator(count: int) -> Iterator[int]:
    for number in range(count):
        yield plain(number)


async def agenerator(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield plain(number)


def fail(number: int) -> None:
    raise ValueError(number)


async def afail(number: int) -> None:
    raise ValueError(number)


def fail_once(path: str) -> str:
    with own("own"):
        if not os.path.exists(path):
            os.close(os.open(path, os.O_CREAT))
            raise ConnectionError("once")
    return "done"


def context_here() -> str:
    """The ids of the trace and the span that are current, as hexadecimal numbers."""
    context = trace.get_current_span().get_span_context()
    return f"{context.trace_id:x} {context.span_id:x}"


def context_here_for(_: int) -> str:
    return context_here()


def double(number: int) -> int:
    return 2 * number


def passed() -> None:
    """Do nothing."""


async def amany(count: int) -> int:
    """Make a map and a stream, each of `count` items."""
    runner = percore.current_runner()
    assert await runner.map(plain, range(count)) == list(range(count))
    assert [item async for item in runner.stream(agenerator, count)] == list(range(count))
    return count


def many(count: int) -> int:
    """As `amany`, from a thread."""
    runner = percore.current_runner()
    assert list(runner.map(plain, range(count))) == list(range(count))
    assert list(runner.stream(generator, count)) == list(range(count))
    return count
