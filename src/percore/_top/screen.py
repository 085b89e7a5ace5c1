"""Draws a view with rich: a head, the workers, and the functions. Narrow terminals get the columns that matter most."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from percore._monitor.tables import duration, mebibytes, size
from percore._monitor.views import Function, Share, View, Worker


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        head: its heading.
        from_width: the width of the terminal, in columns, from which on it is shown.
        text: returns the text of a row.
        order: returns what rows are sorted by, the largest first; None: nobody sorts by it.
    """

    head: str
    from_width: int
    text: Callable[[Any], str]
    order: Callable[[Any], float] | None = None


def printable(text: str) -> str:
    """Return a text of another program without what a terminal would obey, such as escape sequences."""
    return "".join(one if one.isprintable() or one == "\n" else "\N{REPLACEMENT CHARACTER}" for one in text)


def _usage(name: str) -> Callable[[Worker], float]:
    return lambda worker: getattr(worker.usage, name, None) or 0


def _shown(name: str, shape: Callable[[Any], str]) -> Callable[[Worker], str]:
    def text(worker: Worker) -> str:
        value = getattr(worker.usage, name, None)
        return "-" if value is None else shape(value)

    return text


def _figure(name: str) -> Callable[[Any], str]:
    return lambda row: str(row.figures[name])


def _number(name: str) -> Callable[[Any], float]:
    return lambda row: row.figures[name] or 0


def _percentile(what: str, which: str) -> Callable[[Any], float | None]:
    return lambda row: None if row.figures.get(what) is None else row.figures[what][which]


def _percentile_text(what: str, which: str) -> Callable[[Any], str]:
    value = _percentile(what, which)
    return lambda row: duration(value(row))


def _percentile_order(what: str, which: str) -> Callable[[Any], float]:
    value = _percentile(what, which)
    return lambda row: value(row) or 0


def _label(row: Function | Share) -> str:
    if isinstance(row, Function):
        return str(row.figures["name"])
    return f"  {row.node} worker {row.worker}" if row.node else f"  worker {row.worker}"


def rate(number: float | None) -> str:
    """Return a rate as tables show it; None: it is not known yet."""
    if number is None:
        return "-"
    return f"{number:.1f}" if number < 100 else f"{number:,.0f}"


def now_of(worker: Worker) -> str:
    """Return what a worker runs now: its longest call, for how long, and how many others; or what blocks its event loop."""
    blocking, calls = worker.figures.get("blocked_by"), worker.figures["current"]
    if worker.figures["blocked_for"] and blocking:
        return f"by {blocking.rpartition('.')[2]}"
    if not calls:
        return ""
    longest = max(calls, key=lambda call: call["seconds"] or 0)
    running = max(worker.figures["running"], len(calls))
    others = f" +{running - 1}" if running > 1 else ""
    took = "" if longest["seconds"] is None else f" {duration(longest['seconds'])}"
    return f"{longest['name'].rpartition('.')[2]}{took}{others}"


WORKERS: Final = (
    Column("worker", 0, lambda worker: f"{worker.figures['index']}"),
    Column("PID", 40, lambda worker: str(worker.figures["pid"] or "-")),
    Column("state", 40, _figure("state")),
    Column("%CPU", 40, _shown("cpu", lambda cpu: f"{cpu:.0f}"), _usage("cpu")),
    Column("RSS", 120, _shown("rss", mebibytes), _usage("rss")),
    Column("USS", 100, _shown("uss", mebibytes), _usage("uss")),
    Column("thr", 140, _shown("threads", str), _usage("threads")),
    Column("run", 0, _figure("running"), _number("running")),
    Column("queue", 60, _figure("queued"), _number("queued")),
    Column("done", 80, _figure("done"), _number("done")),
    Column("fail", 60, _figure("failed"), _number("failed")),
    Column("calls/s", 0, lambda worker: rate(worker.calls), lambda worker: worker.calls or 0),
    Column("p50", 90, _percentile_text("run", "p50"), _percentile_order("run", "p50")),
    Column("p99", 90, _percentile_text("run", "p99"), _percentile_order("run", "p99")),
    Column("lag", 110, lambda worker: duration(worker.figures["loop_lag"]), _number("loop_lag")),
    Column("bytes/s", 130, lambda worker: size(worker.bytes), lambda worker: worker.bytes or 0),
    Column("new", 120, _figure("restarts"), _number("restarts")),
    Column("now", 80, now_of),
)

FUNCTIONS: Final = (
    Column("function", 0, _label),
    Column("run", 60, _figure("running"), _number("running")),
    Column("done", 80, _figure("ended"), _number("ended")),
    Column("fail", 50, _figure("failed"), _number("failed")),
    Column("calls/s", 0, lambda function: rate(function.calls), lambda function: function.calls or 0),
    Column("wait p50", 100, _percentile_text("wait", "p50"), _percentile_order("wait", "p50")),
    Column("wait p99", 70, _percentile_text("wait", "p99"), _percentile_order("wait", "p99")),
    Column("run p50", 100, _percentile_text("run", "p50"), _percentile_order("run", "p50")),
    Column("run p99", 60, _percentile_text("run", "p99"), _percentile_order("run", "p99")),
)


def orders() -> list[str]:
    """Return the headings that rows can be sorted by, those of workers first."""
    return list(dict.fromkeys(column.head for column in (*WORKERS, *FUNCTIONS) if column.order is not None))


def draw(view: View, width: int, order: str = "", hint: str = "", *, by_worker: bool = False) -> RenderableType:
    """Return what a terminal of this width shows.

    `order`: the heading to sort by; empty: by number. `hint`: the last line. `by_worker`: show functions by worker, too.
    """
    parts: list[RenderableType] = [_head(view, width)]
    if view.blocked_for:
        parts.append(Text(f"the program's event loop has been blocked for {view.blocked_for:.0f} s", style="bold red"))
    parts.extend(_workers(view, width, order))
    if view.functions:
        parts.append(_functions(view, width, order, by_worker=by_worker))
    advised = (one.figures for one in view.functions if one.figures["advice"])
    parts.extend(Text(printable(f"{one['name']}: {one['advice']}"), style="yellow") for one in advised)
    if hint:
        parts.append(Text(hint, style="dim", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def _head(view: View, width: int) -> RenderableType:
    totals = view.totals
    text = Text.from_markup(f"[bold]{escape(printable(view.name))}[/bold] ({view.pid})", overflow="ellipsis")
    text.no_wrap = True
    text.append(f"  {_count(view.workers)}, {rate(view.calls)} calls/s")
    if width >= 80:
        text.append(f"  running {totals['running']}, queued {totals['queued']}, done {totals['done']}, failed {totals['failed']}")
    if width >= 120 and view.supervisor is not None:
        text.append(f"  supervisor {view.supervisor.cpu:.0f} %CPU, {mebibytes(view.supervisor.rss)}")
    return text


def _style(worker: Worker) -> str:
    if worker.figures["blocked_for"]:
        return "bold red"
    return "" if worker.figures["state"] == "ready" else "yellow"


def _workers(view: View, width: int, order: str) -> Iterator[RenderableType]:
    """Yield the table of workers; of those on several nodes a line and a table for each node, with equal columns."""
    shown = _shown_at(WORKERS, width)
    nodes = sorted({worker.node for worker in view.workers})
    rows = {node: [one for one in _ordered(view.workers, shown, order) if one.node == node] for node in nodes}
    cells = {node: [_cells(worker, shown) for worker in workers] for node, workers in rows.items()}
    widths = [max(map(len, column)) for column in zip(*(line for lines in cells.values() for line in lines), strict=True)]
    for node in nodes:
        if len(nodes) > 1:
            yield _of_node(node, rows[node])
        table = _table(shown, width, order, widths)
        for worker, line in zip(rows[node], cells[node], strict=True):
            table.add_row(*map(Text, line), style=_style(worker))
        yield table


def _of_node(node: str, workers: Sequence[Worker]) -> Text:
    rates = [one.calls for one in workers if one.calls is not None]
    running, failed = (sum(one.figures[name] for one in workers) for name in ("running", "failed"))
    text = Text(printable(f"node {node}" if node else "this machine"), style="bold", overflow="ellipsis", no_wrap=True)
    calls = rate(sum(rates) if rates else None)
    return text.append(f"  {_count(workers)}, {calls} calls/s, running {running}, failed {failed}", style="not bold")


def _count(workers: Sequence[Worker]) -> str:
    return f"{len(workers)} worker{'s' if len(workers) != 1 else ''}"


def _cells(worker: Worker, columns: Sequence[Column]) -> list[str]:
    cells = [printable(column.text(worker)) for column in columns]
    if worker.figures["blocked_for"]:
        cells[-1] = f"blocked {worker.figures['blocked_for']:.0f} s {cells[-1]}"
    return cells


def _functions(view: View, width: int, order: str, *, by_worker: bool) -> Table:
    shown = _shown_at(FUNCTIONS, width)
    table = _table(shown, width, order)
    for function in _ordered(view.functions, shown, order):
        table.add_row(*(Text(printable(column.text(function))) for column in shown))
        for share in _ordered(function.workers, shown, order) if by_worker else ():
            table.add_row(*(Text(printable(column.text(share))) for column in shown), style="dim")
    return table


Row = TypeVar("Row", Worker, Function, Share)


def _ordered(rows: Sequence[Row], columns: Sequence[Column], order: str) -> Sequence[Row]:
    key = next((column.order for column in columns if column.head == order), None)
    return rows if key is None else sorted(rows, key=key, reverse=True)


def _shown_at(columns: Sequence[Column], width: int) -> list[Column]:
    return [column for column in columns if width >= column.from_width]


def _table(columns: Sequence[Column], width: int, order: str, widths: Sequence[int] = ()) -> Table:
    """Return a table without rows. `widths`: at least so wide are its columns, where others have to be equal to them."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", pad_edge=False, width=min(width, 200))
    for column, least in zip(columns, widths or [0] * len(columns), strict=True):
        is_wide = column.head in {"function", "now"}
        table.add_column(
            f"{column.head}*" if column.head == order else column.head,
            justify="left" if is_wide or column.head == "state" else "right",
            no_wrap=True,
            overflow="ellipsis",
            min_width=12 if column.head == "function" else None if is_wide else least,
            ratio=1 if is_wide else None,
        )
    return table
