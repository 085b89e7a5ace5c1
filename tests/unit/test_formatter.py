"""percore.logging.Formatter: one format for the records of the program, of percore and of workers."""

import asyncio
import logging
import logging.config
import logging.handlers
import os
import queue
import sys
import warnings
from typing import Any

import pytest

import percore
from percore.logging import Formatter, WorkerFilter

SHOWN = "%(levelname)s %(origin)s %(worker)s %(pid)s %(message)s"


def record(**attributes: Any) -> logging.LogRecord:
    made = logging.LogRecord("crawler", logging.INFO, __file__, 1, "fetched %d", (3,), None)
    made.__dict__.update(attributes)
    return made


def test_one_format_fits_every_record() -> None:
    shown = Formatter(SHOWN).format
    assert shown(record()) == f"INFO program - {os.getpid()} fetched 3"
    assert shown(record(worker=None, pid=os.getpid())) == f"INFO program - {os.getpid()} fetched 3"
    assert shown(record(worker=2, pid=77)) == "INFO worker 2 2 77 fetched 3"
    assert shown(record(worker=2, pid=None, process=88)) == "INFO worker 2 2 88 fetched 3"
    assert shown(record(process=None)) == f"INFO program - {os.getpid()} fetched 3"


def test_in_the_thread_of_a_worker_a_record_is_that_worker_s() -> None:
    async def logged() -> list[str]:
        return [Formatter("%(origin)s").format(one) for one in (record(), record(worker=None), record(worker=7))]

    async def main() -> list[str]:
        async with percore.Runner(1, engine="threads") as runner:
            return await runner.run(logged)

    with warnings.catch_warnings(action="ignore"):
        assert asyncio.run(main()) == ["worker 0", "program", "worker 7"]
    assert Formatter("%(origin)s").format(record()) == "program"


def test_a_filter_tells_the_worker_to_whoever_formats_the_record_later() -> None:
    kept: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = logging.handlers.QueueHandler(kept)
    handler.addFilter(WorkerFilter())
    logger = logging.Logger("crawler")
    logger.addHandler(handler)

    async def coroutine() -> None:
        logger.warning("from a coroutine")
        await asyncio.to_thread(logger.warning, "from its thread")

    def plain() -> None:
        logger.warning("from a plain function")
        logger.warning("about a worker", extra={"worker": None})

    async def main() -> None:
        async with percore.Runner(1, engine="threads") as runner:
            logger.warning("from the program")
            await runner.run(coroutine)
            await runner.run(plain)

    with warnings.catch_warnings(action="ignore"):
        asyncio.run(main())
    found = [vars(kept.get_nowait()) for _ in range(5)]
    shown = [(one["message"], one.get("worker", "none"), one.get("pid")) for one in found]
    assert shown == [
        ("from the program", "none", None),
        ("from a coroutine", 0, os.getpid()),
        ("from its thread", 0, os.getpid()),
        ("from a plain function", 0, os.getpid()),
        ("about a worker", None, None),
    ]
    assert WorkerFilter("crawler").filter(record())
    assert not WorkerFilter("server").filter(record())


def test_other_handlers_see_the_record_as_it_was() -> None:
    one = record()
    before = vars(one).copy()
    Formatter(SHOWN).format(one)
    assert vars(one) == before


def test_a_traceback_is_formatted_once() -> None:
    try:
        raise ValueError("no such page")
    except ValueError:
        one = record(exc_info=sys.exc_info())
    text = Formatter(SHOWN).format(one)
    assert text.endswith("ValueError: no such page")
    assert one.exc_text in text  # type: ignore[operator]


@pytest.mark.parametrize("style", ["%", "{", "$"])
def test_without_a_format_it_shows_the_origin(style: Any) -> None:
    assert "INFO crawler [worker 2] fetched 3" in Formatter(style=style).format(record(worker=2))


def test_a_wrong_format_is_refused() -> None:
    with pytest.raises(ValueError, match="Style must be one of"):
        Formatter("x", style="?")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Invalid format"):
        Formatter("no field at all")


def test_a_dict_names_it() -> None:
    name = "tests.formatter"
    configuration = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"all": {"class": "percore.logging.Formatter", "format": SHOWN}},
        "filters": {"workers": {"()": "percore.logging.WorkerFilter"}},
        "handlers": {"out": {"class": "logging.StreamHandler", "formatter": "all", "filters": ["workers"]}},
        "loggers": {name: {"handlers": ["out"]}},
    }
    logging.config.dictConfig(configuration)
    (made,) = logging.getLogger(name).handlers
    logging.getLogger(name).handlers.clear()
    assert isinstance(made.formatter, Formatter)
    assert isinstance(made.filters[0], WorkerFilter)
    assert made.formatter.format(record(worker=2, pid=77)) == "INFO worker 2 2 77 fetched 3"
