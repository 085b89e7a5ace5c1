"""percore's own log records say who is speaking: unconfigured logging writes nothing but their text."""

import ast
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import percore
from percore._common.log import report

SOURCE = Path(percore.__file__).parent


def test_a_report_names_percore(caplog: pytest.LogCaptureFixture) -> None:
    report(logging.WARNING, "worker %d died", 3)
    (record,) = caplog.records
    assert (record.name, record.getMessage()) == ("percore", "percore: worker 3 died")
    assert record.pathname == __file__
    assert (record.worker, record.pid) == (None, os.getpid())  # type: ignore[attr-defined]
    report(logging.WARNING, "worker %d died", 3, of=SimpleNamespace(index=3, pid=77))
    assert (caplog.records[1].worker, caplog.records[1].pid) == (3, 77)  # type: ignore[attr-defined]


class Refuses(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("the log is full")


def test_a_handler_that_raises_stops_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    handler = Refuses()
    logging.getLogger("percore").addHandler(handler)
    try:
        report(logging.WARNING, "worker %d died", 3)
    finally:
        logging.getLogger("percore").removeHandler(handler)
    assert "percore: worker %d died" in capsys.readouterr().err


def _literals_logged() -> list[tuple[str, int, str]]:
    """Each text that a module gives to its own `logger`, where that is percore's."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if 'logger: Final = logging.getLogger("percore")' in text:
            for node in ast.walk(ast.parse(text)):
                match node:
                    case ast.Call(func=ast.Attribute(ast.Name("logger"), _), args=[ast.Constant(str(said)), *_]):
                        found.append((path.name, node.lineno, said))
    return found


def test_what_is_logged_about_a_worker_names_it_in_the_record() -> None:
    """A text that begins with a worker, in the part of the program that knows workers as objects, comes with `of=`."""
    about = []
    for path in sorted((SOURCE / "_supervisor").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Name("report"), args=[_, ast.Constant(str(said)), *_], keywords=given):
                    if said.startswith(("%s has", "%s is", "%s died", "worker %d")):
                        about.append((path.name, said, "of" in [keyword.arg for keyword in given]))
    assert len(about) > 5
    assert [one for one in about if not one[2]] == []


def test_everything_that_is_logged_names_percore() -> None:
    logged = _literals_logged()
    assert {name for name, _, _ in logged} >= {"lifespan.py", "log_forwarding.py"}
    assert [place for place in logged if not place[2].startswith("percore: ")] == []
