"""Context variables of a script's own module."""

from pathlib import Path

import pytest

from tests.e2e.scripts import output_of

SCRIPT = """
import asyncio, sys
from contextvars import ContextVar
import percore

user = ContextVar("user", default="nobody")

def who():
    return user.get()

async def awho():
    return user.get()

def who_for(place):
    return f"{place} {user.get()}"

async def main():
    async with percore.Runner(2, contextvars=[user], start_method=sys.argv[1]) as runner:
        print(await runner.run(who), await runner.run(awho))
        user.set("ada")
        print(await runner.run(who), await runner.run(awho))
        print(await runner.map(who_for, range(3)))
        print(await runner.broadcast(awho))

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("start_method", ["forkserver", "spawn"])
def test_variables_of_the_script(tmp_path: Path, start_method: str) -> None:
    assert output_of(SCRIPT, tmp_path, start_method).splitlines() == [
        "nobody nobody",
        "ada ada",
        "['0 ada', '1 ada', '2 ada']",
        "['ada', 'ada']",
    ]
