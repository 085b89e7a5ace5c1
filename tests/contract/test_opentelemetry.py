"""OpenTelemetry: one trace over all processes, and spans of the calls."""

import asyncio
import pickle
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import baggage, context, propagate, trace
from opentelemetry.propagators.textmap import TextMapPropagator
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider

import percore
from percore import WorkerDied
from percore.opentelemetry import instrument, uninstrument
from tests import jobs, variables
from tests import traced_jobs as traced
from tests.contract import stream_jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.fakes import FakeRunner
from tests.traced_jobs import Span


@pytest.fixture(autouse=True)
def instrumented() -> Iterator[None]:
    traced.export_here()
    traced.ended()
    instrument()
    yield
    uninstrument()


async def spans_of(runner: percore.Runner) -> list[Span]:
    """All spans that have ended, here and in workers, but for those of asking for them.

    The thread of a batch ends its span after it has sent the last result. So with one thread wait for its next call.
    """
    await runner.run(traced.passed)
    found = {span.id: span for spans in [traced.ended(), *await runner.broadcast(traced.ended), traced.ended()] for span in spans}
    return [span for span in found.values() if span.name not in ("ended", "passed")]


def path_of(span: Span, spans: list[Span]) -> list[str]:
    """The names and kinds of a span and all above it, the root first."""
    above = [one for one in spans if one.id == span.parent]
    assert above or span.parent is None, f"the parent of {span} is missing"
    return [*(path_of(above[0], spans) if above else ()), f"{span.name} {span.kind.lower()}"]


def only(spans: list[Span], name: str, kind: str) -> Span:
    (span,) = (span for span in spans if (span.name, span.kind) == (name, kind))
    return span


async def test_one_trace_over_calls_of_calls_of_calls(make: MakeRunner) -> None:
    async with make(2, lifespan=traced.exporting) as runner:
        token = context.attach(baggage.set_baggage("who", "me"))
        try:
            with traced.own("order"):
                assert await runner.run(traced.adown, 3) == "me"
        finally:
            context.detach(token)
        spans = await spans_of(runner)
    assert len({span.trace for span in spans}) == 1
    deepest = only(spans, "own 0", "INTERNAL")
    steps = ["order internal"]
    for depth, name in ((3, "adown"), (2, "down"), (1, "adown"), (0, "down")):
        steps += [f"{name} client", f"{name} server", f"own {depth} internal"]
    assert path_of(deepest, spans) == steps
    assert len(spans) == len(steps)
    assert {span.status for span in spans} == {"UNSET"}
    served = only([span for span in spans if span.parent == only(spans, "own 1", "INTERNAL").id], "down", "CLIENT")
    assert served.attributes["code.function.name"] == "tests.traced_jobs.down"


@pytest.mark.parametrize(("fn", "streamed"), [(traced.amany, "agenerator"), (traced.many, "generator")])
async def test_one_trace_over_maps_and_streams_of_calls(make: MakeRunner, fn: Any, streamed: str) -> None:
    async with make(2, lifespan=traced.exporting) as runner:
        with traced.own("order"):
            assert await runner.run(fn, 3) == 3
        spans = await spans_of(runner)
    own = [path_of(span, spans) for span in spans if span.name == "own"]
    above = ["order internal", f"{fn.__name__} client", f"{fn.__name__} server"]
    paths = [[*above, f"{name} client", f"{name} server", "own internal"] for name in ("plain", streamed)]
    assert sorted(own) == sorted(paths * 3)


async def test_each_verb_carries_the_context(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async def stream(fn: Any) -> list[int]:
        return [item async for item in runner.stream(fn, 2)]

    async def later(fn: Any) -> Any:
        with traced.own("order"):
            made = runner.map(fn, range(2))
        return await made  # outside the span: a map has the context of its creation

    async with make(threads=1, lifespan=traced.exporting) as runner:
        verbs: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...], int]] = {
            "run": (runner.run, (traced.plain, traced.coroutine), (1,), 1),
            "submit": (runner.submit, (traced.plain, traced.coroutine), (1,), 1),
            "broadcast": (runner.broadcast, (traced.plain, traced.coroutine), (1,), 1),
            "map": (runner.map, (traced.plain, traced.coroutine), (range(2),), 2),
            "a map that is awaited later": (later, (traced.plain, traced.coroutine), (), 2),
            "stream": (stream, (traced.generator, traced.agenerator), (), 2),
            "options": (runner.options(key="k", timeout=1e6).run, (traced.plain, traced.coroutine), (1,), 1),
        }
        for verb, (make_call, fns, args, count) in verbs.items():
            for fn in fns:
                with subtests.test(verb=verb, fn=fn.__name__):
                    with nullcontext() if make_call is later else traced.own("order"):
                        await make_call(fn, *args)
                    spans = await spans_of(runner)
                    own = [span for span in spans if span.name == "own"]
                    paths = {tuple(path_of(span, spans)) for span in own}
                    assert (len(own), paths) == (
                        count,
                        {("order internal", f"{fn.__name__} client", f"{fn.__name__} server", "own internal")},
                    )
                    if verb == "options":
                        assert only(spans, fn.__name__, "CLIENT").attributes["percore.key"] == "k"


async def test_batches_share_a_span_and_tell_their_errors(make: MakeRunner) -> None:
    async with make(threads=1, lifespan=traced.exporting) as runner:
        with traced.own("order"):
            assert await runner.map(traced.double, range(5000)) == [2 * number for number in range(5000)]
        spans = await spans_of(runner)
        client = only(spans, "double", "CLIENT")
        served = [span for span in spans if span.kind == "SERVER"]
        assert sum(span.attributes.get("percore.items", 1) for span in served) == 5000
        assert {span.parent for span in served} == {client.id}
        assert len(served) < 2500
        with pytest.raises(ValueError, match="0"):
            await runner.map(traced.fail, range(3))
        spans = await spans_of(runner)
        assert (only(spans, "fail", "CLIENT").status, only(spans, "fail", "CLIENT").events) == ("ERROR", ["ValueError"])
        assert {(span.status, *span.events) for span in spans if span.kind == "SERVER"} == {("ERROR", "ValueError")}


async def test_an_error_without_a_text_stays_as_it_is(make: MakeRunner) -> None:
    async with make(lifespan=traced.exporting) as runner:
        for fn in (jobs.fail, jobs.afail):
            with pytest.raises(jobs.BadText):
                await runner.run(fn, jobs.BadText)
            with pytest.raises(jobs.BadText):
                await runner.submit(fn, jobs.BadText)
        with pytest.raises(jobs.BadText):
            await runner.map(jobs.fail, [jobs.BadText])
        spans = await spans_of(runner)
        assert {(span.status, *span.events) for span in spans} == {("ERROR", "tests.jobs.BadText")}
        assert len(spans) == 10


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_errors_retries_and_cancellation(make: MakeRunner, tmp_path: Path, gate: Gate, log: Log) -> None:
    async with make(lifespan=traced.exporting) as runner:
        for fn in (traced.fail, traced.afail):
            with pytest.raises(ValueError, match="7"):
                await runner.run(fn, 7)
            for span in await spans_of(runner):
                assert (span.name, span.status, span.events) == (fn.__name__, "ERROR", ["ValueError"])
                assert span.attributes["error.type"] == "ValueError"
        retrying = runner.options(retries=2, retry_on=ConnectionError)
        assert await retrying.run(traced.fail_once, str(tmp_path / "once")) == "done"
        spans = await spans_of(runner)
        client = only(spans, "fail_once", "CLIENT")
        assert (client.status, client.attributes["percore.attempts"]) == ("UNSET", 2)
        assert sorted((span.status, span.parent) for span in spans if span.kind == "SERVER") == [
            ("ERROR", client.id),
            ("UNSET", client.id),
        ]
        assert [path_of(span, spans)[0] for span in spans if span.name == "own"] == ["fail_once client"] * 2

        call = runner.submit(jobs.await_, log.path, gate.path)
        await log.next()
        call.cancel()
        with suppress(asyncio.CancelledError):
            await call
        await runner.run(traced.double, 1)
        spans = [span for span in await spans_of(runner) if span.name == "await_"]
        assert {span.kind for span in spans} >= {"CLIENT"}
        assert {(span.status, span.attributes["percore.cancelled"]) for span in spans} == {("UNSET", True)}

        with pytest.raises(TypeError, match="cannot pickle"):
            await runner.run(jobs.echo, threading.Lock())
        spans = await spans_of(runner)
        assert [(span.kind, span.status) for span in spans] == [("CLIENT", "ERROR")]


async def test_a_death_is_on_the_callers_span(make_real: MakeRunner) -> None:
    async with make_real(lifespan=traced.exporting) as runner:
        with traced.own("order"), pytest.raises(WorkerDied):
            await runner.run(jobs.die)
        (span,) = (span for span in traced.ended() if span.kind == "CLIENT")
    assert (span.name, span.status, span.attributes["error.type"], span.events) == (
        "die",
        "ERROR",
        "percore.WorkerDied",
        ["percore.WorkerDied"],
    )


async def test_calls_that_are_cut_off_end_their_spans(make: MakeRunner, gate: Gate, log: Log) -> None:
    runner = make(lifespan=traced.exporting)
    await runner.start()
    call = runner.submit(jobs.await_, log.path, gate.path)
    await log.next()
    await runner.aclose(grace=0)
    with pytest.raises(percore.RunnerClosed):
        await call
    spans = {span.kind: span for span in traced.ended() if span.name == "await_"}
    assert (spans["CLIENT"].status, spans["CLIENT"].events) == ("ERROR", ["percore.RunnerClosed"])


async def test_the_context_without_spans_of_percore(make: MakeRunner) -> None:
    instrument(spans=False)
    async with make(lifespan=traced.exporting, contextvars=[variables.level]) as runner:
        variables.level.set(5)
        with traced.own("order"):
            assert await runner.run(traced.coroutine, 1) == 1
            assert await runner.map(traced.plain, range(2)) == [0, 1]
            assert (await runner.run(variables.read))[1] == 5
        spans = await spans_of(runner)
        assert await runner.run(traced.context_here) == "0 0"  # nothing of an earlier call stays in the worker
    assert [path_of(span, spans) for span in spans if span.name == "own"] == [["order internal", "own internal"]] * 3
    assert len(spans) == 4


async def test_who_is_not_instrumented_carries_nothing(make: MakeRunner) -> None:
    uninstrument()
    async with make(lifespan=traced.exporting) as runner:
        instrument()  # too late for this runner
        with traced.own("order"):
            assert await runner.run(traced.context_here) == "0 0"
            assert await runner.map(traced.context_here_for, range(2)) == ["0 0"] * 2


def test_executors_carry_the_context_of_the_submitting_thread() -> None:
    with percore.LoopPoolExecutor(1, lifespan=traced.exporting) as executor:
        with traced.own("order"):
            assert executor.submit(traced.plain, 1).result() == 1
            assert executor.submit(traced.coroutine, 1).result() == 1
            assert list(executor.map(lambda number: traced.plain(number), [1])) == [1]
            failed = executor.submit(traced.fail, 1)
            assert isinstance(failed.exception(), ValueError)
        spans = [*traced.ended(), *executor.submit(traced.ended).result(), *traced.ended()]
    own = [path_of(span, spans) for span in spans if span.name == "own"]
    name = "test_executors_carry_the_context_of_the_submitting_thread.<locals>.<lambda>"
    assert own == [["order internal", f"{fn} client", f"{fn} server", "own internal"] for fn in ("plain", "coroutine", name)]
    assert {(span.kind, span.status) for span in spans if span.name == "fail"} == {("CLIENT", "ERROR"), ("SERVER", "ERROR")}


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_tracing_that_a_worker_cannot_load_fails_the_start(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __reduce__(self) -> Any:
            return jobs.fail, (ValueError("no tracing here"),)

    monkeypatch.setattr("percore._common.tracing.Installed.tracing", Broken())
    runner = make()
    with pytest.raises(percore.StartupFailed, match="no tracing here"):
        await runner.start()


def test_only_the_choice_of_spans_goes_to_workers() -> None:
    from percore._common.tracing import Installed

    tracing = pickle.loads(pickle.dumps(Installed.tracing))
    with tracing.around(traced.double) as failed:  # no caller's context: no span
        failed(ValueError())
    assert traced.ended() == []


def test_a_span_that_ends_while_others_are_collected_is_kept() -> None:
    """With workers that are threads, all spans of the tests lie in one place."""

    def end_many() -> None:
        for _ in range(2000):
            with traced.own("own"):
                pass

    thread = threading.Thread(target=end_many)
    thread.start()
    found = 0
    while thread.is_alive():
        found += len(traced.ended())
    thread.join()
    assert found + len(traced.ended()) == 2000


class Failing(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        raise LookupError(span.name)


async def test_a_span_processor_that_raises_costs_no_call_its_end(caplog: pytest.LogCaptureFixture) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Failing())
    instrument(tracer_provider=provider)
    async with FakeRunner(1, max_pending=1) as runner:
        assert await runner.submit(abs, -1) == 1
        async with runner.stream(traced.agenerator, 3) as stream:
            await anext(stream)
        assert await asyncio.wait_for(runner.map(abs, [-2]), 20) == [2]  # the stream has left its place under `max_pending`
        with pytest.raises(ValueError, match="invalid literal"):
            await runner.run(int, "one")
    assert {record.getMessage() for record in caplog.records if record.levelname == "ERROR"} == {
        "percore: a span could not be ended"
    }


class NoHeaders(TextMapPropagator):
    """A propagator that raises when it is told to write, or to read."""

    def __init__(self, at: str) -> None:
        self._at = at

    def inject(self, carrier: Any, context: Any = None, setter: Any = None) -> None:
        carrier["half"] = "written"
        if self._at == "written":
            raise LookupError

    def extract(self, carrier: Any, context: Any = None, getter: Any = None) -> context.Context:
        assert carrier
        raise LookupError

    @property
    def fields(self) -> set[str]:
        return set()


async def test_a_propagator_that_raises_costs_no_call(caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests) -> None:
    before = propagate.get_global_textmap()
    try:
        for at in ("written", "read"):
            for spans in (True, False):
                caplog.clear()
                propagate.set_global_textmap(NoHeaders(at))
                instrument(spans=spans)
                with subtests.test(at, spans=spans):
                    async with FakeRunner(1, lifespan=traced.exporting) as runner:
                        assert await runner.submit(jobs.echo, 1) == 1
                        assert await runner.run(jobs.aecho, 1) == 1
                        assert await runner.map(jobs.echo, range(3)) == [0, 1, 2]
                        assert [item async for item in runner.stream(stream_jobs.numbers, 3)] == [0, 1, 2]
                        assert runner.statistics().restarts == 0
                    text = f"percore: the context of a call could not be {at}"
                    assert {one.getMessage() for one in caplog.records if one.levelname == "ERROR"} == {text}
    finally:
        propagate.set_global_textmap(before)


class Broken(SpanProcessor):
    """Raises at the beginning or at the end of each span, while it is told to."""

    at = ""

    def on_start(self, span: ReadableSpan, parent_context: context.Context | None = None) -> None:
        if self.at == "start":
            raise LookupError(span.name)

    def on_end(self, span: ReadableSpan) -> None:
        if self.at == "end":
            raise LookupError(span.name)


async def test_a_span_processor_that_raises_in_workers_costs_no_call_and_no_worker(
    caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    """The items of a batch share a span, which ends when all of them have been answered."""
    provider, broken = trace.get_tracer_provider(), Broken()
    assert isinstance(provider, TracerProvider)
    provider.add_span_processor(broken)
    try:
        for broken.at, text in (("start", "a span could not be begun"), ("end", "a span could not be ended")):
            caplog.clear()
            with subtests.test(broken.at):
                async with FakeRunner(1, lifespan=traced.exporting) as runner:
                    assert await runner.run(jobs.echo, 1) == 1
                    assert await runner.run(jobs.aecho, 1) == 1
                    assert await asyncio.wait_for(runner.map(jobs.echo, range(300)), 20) == list(range(300))
                    assert [item async for item in runner.stream(stream_jobs.numbers, 3)] == [0, 1, 2]
                    assert [item async for item in runner.stream(stream_jobs.anumbers, 3)] == [0, 1, 2]
                    with pytest.raises(ValueError, match="invalid literal"):
                        await runner.run(int, "one")
                    assert runner.statistics().restarts == 0
                assert {one.getMessage() for one in caplog.records if one.levelname == "ERROR"} == {f"percore: {text}"}
    finally:
        broken.at = ""
