"""A runner's figures for Prometheus."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import percore
from percore._common.errors import RunnerClosed
from percore._monitor.functions import Percentiles
from percore._monitor.statistics import Statistics


class RunnerCollector(Collector):
    """A collector of prometheus-client that reads `runner.statistics()` at each scrape. Any thread may scrape.

        prometheus_client.REGISTRY.register(percore.web.RunnerCollector(runner))

    It can be registered before the runner starts and stay registered after it has closed: then `percore_runner_open` is 0, and
    there are no other figures. Labels have numbers of workers and names of functions, and no arguments. Times are in seconds.

    Times and payloads are summaries with the quantiles 0.5, 0.9 and 0.99, each exact to about 10 %. They cover the runner's whole
    life and have no sum, because percore keeps none: use counters for rates. Quantiles of several programs cannot be averaged.

    Args:
        runner: the runner to read.
    """

    def __init__(self, runner: percore.Runner) -> None:
        self._runner = runner

    def describe(self) -> Iterable[Metric]:
        """Return all metrics without figures, so that a registry knows their names before the runner starts."""
        return [_is_open(), *_families(Statistics(0, 0, 0, 0, 0, 0, ()))]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment.

        Raises:
            RuntimeError: called after a fork.
        """
        is_open = _is_open()
        try:
            now = self._runner.statistics()
        except RunnerClosed:
            is_open.add_metric([], 0)
            yield is_open
            return
        is_open.add_metric([], 1)
        yield is_open
        yield from _families(now)


def _is_open() -> GaugeMetricFamily:
    return GaugeMetricFamily("percore_runner_open", "Whether the runner is started and not closed", labels=[])


def _families(now: Statistics) -> Iterator[Metric]:
    yield GaugeMetricFamily("percore_calls_running", "Calls that run in workers", now.running)
    yield GaugeMetricFamily("percore_calls_queued", "Calls that wait, in the supervisor or in workers", now.queued)
    yield CounterMetricFamily("percore_calls_done", "Calls that have ended, failures included", now.done)
    yield CounterMetricFamily("percore_calls_failed", "Calls that have ended with an exception or a death", now.failed)
    yield CounterMetricFamily("percore_calls_retried", "Failed attempts that another attempt followed", now.retried)
    yield CounterMetricFamily("percore_worker_restarts", "Replacements of workers", now.restarts)
    yield from _of_workers(now)
    yield from _of_functions(now)


def _of_workers(now: Statistics) -> Iterator[Metric]:
    by_worker = ["worker"]
    ready = GaugeMetricFamily("percore_worker_ready", "Whether the worker is ready for calls", labels=by_worker)
    lag = GaugeMetricFamily("percore_worker_loop_lag_seconds", "How late the worker's event loop is", labels=by_worker)
    blocked = GaugeMetricFamily(
        "percore_worker_loop_blocked_seconds", "For how long the worker's event loop has been blocked", labels=by_worker
    )
    for worker in now.workers:
        labels = [str(worker.index)]
        ready.add_metric(labels, worker.state == "ready")
        blocked.add_metric(labels, worker.blocked_for)
        if worker.loop_lag is not None:
            lag.add_metric(labels, worker.loop_lag)
    yield from (ready, lag, blocked)


def _of_functions(now: Statistics) -> Iterator[Metric]:
    by_function = ["function"]
    running = GaugeMetricFamily("percore_function_running", "Calls of the function that run", labels=by_function)
    ended = CounterMetricFamily("percore_function_ended", "Calls of the function that have ended", labels=by_function)
    failed = CounterMetricFamily("percore_function_failed", "Calls of the function that have failed", labels=by_function)
    pickling = CounterMetricFamily(
        "percore_function_pickling_seconds", "Time that pickling arguments and results took, on both sides", labels=by_function
    )
    wait = Metric("percore_function_wait_seconds", "Time from a call's acceptance to its begin", "summary")
    run = Metric("percore_function_run_seconds", "Time from a call's begin to its end", "summary")
    payload = Metric("percore_function_payload_bytes", "Size of a pickle of arguments or of a result", "summary")
    for function in now.functions:
        labels = [function.name]
        running.add_metric(labels, function.running)
        ended.add_metric(labels, function.ended)
        failed.add_metric(labels, function.failed)
        pickling.add_metric(labels, function.pickling.seconds)
        _add(wait, function.name, function.wait)
        _add(run, function.name, function.run)
        _add(payload, function.name, function.payload)
    yield from (running, ended, failed, pickling, wait, run, payload)


def _add(summary: Metric, name: str, figures: Percentiles | None) -> None:
    if figures is None:
        return
    for quantile, value in (("0.5", figures.p50), ("0.9", figures.p90), ("0.99", figures.p99)):
        summary.add_sample(summary.name, {"function": name, "quantile": quantile}, value)
    summary.add_sample(f"{summary.name}_count", {"function": name}, figures.count)
