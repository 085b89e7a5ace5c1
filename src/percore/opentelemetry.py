"""OpenTelemetry: the context of the current span, and baggage, travel with each call. `pip install percore[otel]`.

    import percore.opentelemetry

    percore.opentelemetry.instrument()

Call it once, before the program makes runners and executors. Their workers need no call: set their tracer provider in the lifespan.
"""

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import percore
from percore._common.callables import full_name, qualified_name
from percore._common.log import report
from percore._common.tracing import Carrier, Installed
from percore._serialization.exception_state import text_of
from percore._worker.context import current_worker

try:
    from opentelemetry import context, propagate, trace
    from opentelemetry.trace import SpanKind, Status, StatusCode, TracerProvider
except ImportError as _error:
    raise ImportError("percore.opentelemetry needs OpenTelemetry: pip install percore[otel]") from _error

__all__ = ["instrument", "uninstrument"]


def instrument(*, spans: bool = True, tracer_provider: TracerProvider | None = None) -> None:
    """Let the calls of all runners and executors that are made from now on carry the current context of OpenTelemetry.

    The context travels as the global propagator writes it, by default the W3C headers `traceparent`, `tracestate` and `baggage`. A
    call sees the context that was current at `run`, `submit`, `stream` or `broadcast`, and a call of a map the one at `map`. Calls
    from inside calls carry the context of these. So spans that the user's functions start in workers belong to the caller's trace.

    Args:
        spans: percore also makes spans: one for each call, map and stream in the process that makes it, of kind CLIENT, and one for
            each call in its worker, of kind SERVER. Short items of a map, which travel together, share one in the worker.
        tracer_provider: the provider of the spans in this process. Default: the global one. Workers use the one that their lifespan
            sets with `trace.set_tracer_provider`.
    """
    Installed.tracing = _Tracing(spans=spans, tracer_provider=tracer_provider)


def uninstrument() -> None:
    """Let the runners and executors that are made from now on carry no context. Idempotent."""
    Installed.tracing = None


class _Tracing:
    """Implements `Tracing`."""

    def __init__(self, *, spans: bool, tracer_provider: TracerProvider | None = None) -> None:
        self._spans = spans
        self._last: tuple[Callable[[], object], Carrier] = _nothing, {}
        """The context of the last carrier, if it still exists, and this carrier."""
        # Without a provider this one finds a global provider that is set later.
        self._tracer = trace.get_tracer("percore", vars(percore)["__version__"], tracer_provider)

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_worker, (self._spans,)

    def carrier(self) -> Carrier:
        current = context.get_current()
        last, carrier = self._last
        if last() is not current:  # many calls are made in one context, and writing its headers costs more than a call
            carrier = _headers(current)
            self._last = ref(current), carrier
        return carrier

    def begin(self, fn: Callable[..., Any], key: object = None) -> "_Span":
        if not self._spans:
            return _Span(self.carrier(), trace.INVALID_SPAN)
        attributes = _attributes(fn)
        if isinstance(key, str | int | float):  # the repr of others would run their code
            attributes["percore.key"] = key
        span = self._begun(fn, SpanKind.CLIENT, attributes)
        if span is None:
            return _Span(self.carrier(), trace.INVALID_SPAN)
        return _Span(_headers(trace.set_span_in_context(span)), span)

    def enter(self, carrier: Carrier) -> None:
        try:
            callers = propagate.extract(carrier)
        except Exception as failure:  # of the user's propagator, which is no error of the call
            report(logging.ERROR, "the context of a call could not be read", exc_info=failure)
        else:
            context.attach(callers)

    @contextmanager
    def around(self, fn: Callable[..., Any], items: int = 1) -> Iterator[Callable[[BaseException], None]]:
        if not (self._spans and trace.get_current_span().get_span_context().is_valid):
            yield _ignore
            return
        worker, attributes = current_worker(), _attributes(fn)
        attributes |= {
            "percore.worker.index": worker.index,
            "percore.worker.generation": worker.generation,
            "process.pid": worker.pid,
        }
        if items > 1:
            attributes["percore.items"] = items
        span = self._begun(fn, SpanKind.SERVER, attributes)
        if span is None:
            yield _ignore
            return
        end = _Span({}, span)
        try:
            with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                yield partial(_failed, span)
        except BaseException as error:
            end.ended(error)
            raise
        end.ended(None)

    def _begun(self, fn: Callable[..., Any], kind: SpanKind, attributes: dict[str, Any]) -> trace.Span | None:
        """Begin a span. None: the user's sampler or span processor has raised, which is no error of the call."""
        try:
            return self._tracer.start_span(qualified_name(fn), kind=kind, attributes=attributes)
        except Exception as failure:
            report(logging.ERROR, "a span could not be begun", exc_info=failure)
            return None


def _headers(current: context.Context) -> Carrier:
    """Return a context as headers. Empty: the user's propagator has raised, which is no error of the call."""
    carrier: Carrier = {}
    try:
        propagate.inject(carrier, context=current)
    except Exception as failure:
        report(logging.ERROR, "the context of a call could not be written", exc_info=failure)
        return {}
    return carrier


def _nothing() -> None:
    return


def _ignore(_error: BaseException) -> None:
    return


def _in_worker(spans: bool) -> _Tracing:
    return _Tracing(spans=spans)


class _Span:
    """Implements `Span`."""

    def __init__(self, carrier: Carrier, span: trace.Span) -> None:
        self.carrier = carrier
        self._span: trace.Span | None = span

    def ended(self, error: BaseException | None, attempts: int = 1) -> None:
        span, self._span = self._span, None
        if span is None:
            return
        try:
            if attempts > 1:
                span.set_attribute("percore.attempts", attempts)
            if error is not None:
                _failed(span, error)
            span.end()
        except Exception as failure:  # of the user's span processor; the call or stream has to go on to its end
            report(logging.ERROR, "a span could not be ended", exc_info=failure)


def _attributes(fn: Callable[..., Any]) -> dict[str, Any]:
    return {"code.function.name": full_name(fn)}


def _failed(span: trace.Span, error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError | concurrent.futures.CancelledError | GeneratorExit):
        span.set_attribute("percore.cancelled", True)
        return
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    name, text = f"{module}{kind.__qualname__}", text_of(error)
    span.set_attribute("error.type", name)
    try:
        span.record_exception(error)
    except Exception:  # the error has no text
        span.add_event("exception", {"exception.type": name, "exception.message": text})
    span.set_status(Status(StatusCode.ERROR, f"{kind.__name__}: {text}"))
