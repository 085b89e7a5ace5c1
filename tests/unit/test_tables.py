"""Tables of figures: columns aligned, and HTML in which nothing of the figures is markup."""

from dataclasses import fields, replace
from typing import Any

from percore import FunctionStatistics, Percentiles, Pickling, Statistics, WorkerStatistics
from percore._monitor.tables import Table, size

TABLE = Table(("name", "n"), (("a", "1"), ("<b>", "100"), ("total", "101")), frozenset({0}))


def test_words_are_aligned_to_the_left_and_figures_to_the_right() -> None:
    assert TABLE.text().splitlines() == ["name     n", "a        1", "<b>    100", "total  101"]


def test_html_escapes_what_it_shows() -> None:
    html = TABLE.html()
    assert html.startswith('<table><thead><tr><th style="text-align: left">name</th><th style="text-align: right">n</th></tr>')
    assert '<td style="text-align: left">&lt;b&gt;</td><td style="text-align: right">100</td>' in html


def test_statistics_without_a_worker_show_what_is_not_known() -> None:
    figures = {"running": 1, "queued": 2, "done": 3, "failed": 4, "retried": 5, "restarts": 6}
    gone = made(WorkerStatistics, index=0, pid=None, state="gone", loop_lag=None, memory=None, **figures)
    ready = made(WorkerStatistics, index=1, pid=77, state="ready", loop_lag=0.00123, memory=None, **figures)
    assert str(made(Statistics, workers=(gone, ready), **figures)).splitlines() == [
        "worker  state  PID  running  queued  done  failed  retried  restarts     lag",
        "0       gone     -        1       2     3       4        5         6       -",
        "1       ready   77        1       2     3       4        5         6  1.2 ms",
        "total                     1       2     3       4        5         6",
    ]
    sampled = replace(ready, memory=30 << 20)
    assert str(made(Statistics, workers=(gone, sampled), **figures)).splitlines() == [
        "worker  state  PID  running  queued  done  failed  retried  restarts     lag    memory",
        "0       gone     -        1       2     3       4        5         6       -         -",
        "1       ready   77        1       2     3       4        5         6  1.2 ms  30.0 MiB",
        "total                     1       2     3       4        5         6          30.0 MiB",
    ]


def test_a_second_table_has_the_functions_and_advice_below() -> None:
    quick = FunctionStatistics("<lambda>", 5, 4, 3, 1, None, None, None, Pickling(), None)
    waits, runs = Percentiles(7, 0.0000042, 0.5, 0.00042), Percentiles(7, 0.0123, 0.5, 12.3)
    slow = FunctionStatistics("a.f", 7, 7, 0, 0, waits, runs, Percentiles(7, 2048, 1, 1), Pickling(), "return <less>")
    statistics = made(Statistics, workers=(), functions=(quick, slow))
    assert str(statistics).splitlines()[3:] == [
        "function  running  done  failed  wait p50  wait p99  run p50  run p99  payload p50",
        "<lambda>        1     4       3         -         -        -        -            -",
        "a.f             0     7       0    4.2 us    420 us  12.3 ms   12.3 s      2.0 KiB",
        "a.f: return <less>",
    ]
    html = statistics._repr_html_()
    assert html.count("<table>") == 2
    assert "&lt;lambda&gt;" in html
    assert html.endswith("<p>a.f: return &lt;less&gt;</p>")
    assert [size(number) for number in (0, 1000, 3 << 20)] == ["0 B", "1000 B", "3.0 MiB"]


def made(kind: Any, **given: Any) -> Any:
    """Return a snapshot in which the figures that are not given are 0."""
    return kind(**dict.fromkeys((field.name for field in fields(kind)), 0) | given)
