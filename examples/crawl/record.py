"""The output file of a crawl: a line of JSON for each page. A resumed crawl does not fetch these pages again."""

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
    """The output file cannot be used. The text is for the user."""


class Record:
    """The output file, open for writing: `with Record(path, resume=True) as record`.

    Starts a new file. With `resume`, continues a file that has pages: pages with a temporary failure and an incomplete
    last line are first removed from it.

    Raises:
        BadRecord: the file cannot be opened or written, has pages although `resume` is false, or has a line that is not a page.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        try:
            # A pipe or a device has no pages, and reading it might block.
            has_pages = self.path.is_file() and self.path.stat().st_size > 0
            if has_pages and not resume:
                raise BadRecord(f"{path} has pages already: --resume continues it, or choose another name")
            if has_pages:
                self._tidy()
            self._file = self.path.open("a" if has_pages else "w", encoding="utf-8")
        except OSError as error:
            raise BadRecord(f"cannot write {path}: {error.strerror}") from error
        self._has_pages = has_pages

    def write(self, page: Page, depth: int) -> None:
        # Flush after each page: however the program ends, the file has every visited page.
        line = {name: getattr(page, name) for name in FIELDS} | {"depth": depth}
        with self._failing():
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def pages(self) -> Iterator[tuple[Page, int]]:
        """Yield the pages of the earlier crawl with their depths."""
        if self._has_pages:
            with self.path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    yield self._read(number, line)

    def _tidy(self) -> None:
        """Remove the pages that are to be fetched again. If this is interrupted, the file is unchanged."""
        path = self.path.resolve()  # replaces the file itself if `path` is a symbolic link
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
        with self._failing():  # closing tries again to write the buffered rest
            self._file.close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BadRecord(f"cannot write {self.path}: {error.strerror}") from error


def is_final(page: Page) -> bool:
    """Whether a page need not be fetched again: it was fetched, or the site answered with a permanent error."""
    return not page.error or (page.status >= 400 and not is_passing(page.status))
