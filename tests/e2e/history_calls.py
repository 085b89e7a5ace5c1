"""What calls of a history do: they write down that they begin. Light to import: workers do."""

import asyncio
import os
import time

LASTS = 0.002
"""Seconds for which a call runs: long enough for strikes in the middle of it."""


def begins(ledger: str, number: int) -> None:
    """Write it before anything else, in one piece."""
    fd = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{number}\n".encode())
    finally:
        os.close(fd)


async def as_task(ledger: str, number: int) -> int:
    begins(ledger, number)
    await asyncio.sleep(LASTS)
    return number


def on_thread(ledger: str, number: int) -> int:
    begins(ledger, number)
    time.sleep(LASTS)
    return number
