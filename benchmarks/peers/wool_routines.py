"""The coroutines of calls.py as wool wants them."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks import calls

_wool: Any = importlib.import_module("wool")


@_wool.routine  # type: ignore[untyped-decorator]
async def same(value: Any) -> Any:
    return await calls.same(value)


@_wool.routine  # type: ignore[untyped-decorator]
async def page_of(url: str) -> str:
    return await calls.page_of(url)
