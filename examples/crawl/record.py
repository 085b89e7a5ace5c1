"""The output file of a crawl: a line of JSON for each page. What is in it need not be fetched again."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import TracebackType

from crawl.pages import Page, is_passing

FIELDS = tuple(field.name for field in fields(Page))


class BadRecord(Exception):
    """The output file cannot be used; the text is for the user."""


class Record:
    """The output file, open for writing: `with Record(path, resume=True) as record`.

    A new one is begun, or one that has pages is continued if `resume` says so. Pages that failed for a reason that may
    have passed are taken out of it then, and so is a last line that was not written to its end.

    Raises:
        BadRecord: it cannot be opened or written, has pages already and is not to be continued, or has a line that is no page.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        try:
            # A pipe or a device has no pages, and reading it might take for ever.
            has_pages = self.path.is_file() and self.path.stat().st_size > 0
            if has_pages and not resume:
                raise BadRecord(f"{path} has pages already: --resume goes on with it, or choose another name")
            if has_pages:
                self._tidy()
            self._file = self.path.open("a" if has_pages else "w", encoding="utf-8")
        except OSError as error:
            raise BadRecord(f"cannot write {path}: {error.strerror}") from error
        self._has_pages = has_pages

    def write(self, page: Page, depth: int) -> None:
        # Flushed page by page: whatever ends this program, the file has every page that was visited.
        line = {name: getattr(page, name) for name in FIELDS} | {"depth": depth}
        with self._failing():
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def pages(self) -> Iterator[tuple[Page, int]]:
        """The pages of the earlier crawl and their depths."""
        if self._has_pages:
            with self.path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    yield self._read(number, line)

    def _tidy(self) -> None:
        """Takes out of the file what is to be fetched again. Interrupted, it leaves the file as it was."""
        path = self.path.resolve()  # a link to the file stays one
        tidied = path.with_name(f"{path.name}.new")
        try:
            with path.open("rb") as lines, tidied.open("wb") as kept:
                for number, line in enumerate(lines, 1):
                    if line.endswith(b"\n") and is_final(self._read(number, line)[0]):
                        kept.write(line)
            if tidied.stat().st_size < path.stat().st_size:
                shutil.copymode(path, tidied)
                os.replace(tidied, path)
        finally:
            tidied.unlink(missing_ok=True)

    def _read(self, number: int, line: bytes) -> tuple[Page, int]:
        try:
            values = json.loads(line)
            depth = int(values.pop("depth"))
            return Page(**{**values, "links": tuple(values["links"])}), depth
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadRecord(f"{self.path}: line {number} is no page of this crawler") from error

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with self._failing():  # once more what could not be written before
            self._file.close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BadRecord(f"cannot write {self.path}: {error.strerror}") from error


def is_final(page: Page) -> bool:
    """Whether there is no point in asking again: the page was had, or the site says that there is none."""
    return not page.error or (page.status >= 400 and not is_passing(page.status))
