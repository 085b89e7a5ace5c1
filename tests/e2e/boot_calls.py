"""Lifespans that fail, with functools.partial."""

import asyncio
import contextlib
import importlib
import os
import sys
from collections.abc import AsyncIterator, Iterator

import percore
from tests.e2e.fault_calls import tell


@contextlib.contextmanager
def failing(births: str, how: str, index: int) -> Iterator[None]:
    """Fail to be entered, in that worker or, with -1, in all."""
    tell(births)
    if index in (-1, percore.current_worker().index):
        if how == "raise":
            raise LookupError("there is no database")
        if how == "sys.exit":
            sys.exit(3)
        if how == "import":
            importlib.import_module("there_is_no_such_module")
        os._exit(3)
    yield


@contextlib.asynccontextmanager
async def dying_when_ready(flag: str, births: str) -> AsyncIterator[None]:
    """Enter, and die a millisecond later, while the file exists."""
    tell(births)
    if os.path.exists(flag):  # noqa: ASYNC240  # a look at a name
        asyncio.get_running_loop().call_later(0.001, os._exit, 5)
    yield
