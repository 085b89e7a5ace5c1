"""Context variables of a script's own module."""

from pathlib import Path

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

async def main(method):
    async with percore.Runner(2, contextvars=[user], start_method=method) as runner:
        print(method)
        print(await runner.run(who), await runner.run(awho))
        token = user.set("ada")
        print(await runner.run(who), await runner.run(awho))
        print(await runner.map(who_for, range(3)))
        print(await runner.broadcast(awho))
        user.reset(token)

if __name__ == "__main__":
    for method in sys.argv[1:]:
        asyncio.run(main(method))
"""
METHODS = ("forkserver", "spawn")


def test_variables_of_the_script(tmp_path: Path) -> None:
    expected = ["nobody nobody", "ada ada", "['0 ada', '1 ada', '2 ada']", "['ada', 'ada']"]
    assert output_of(SCRIPT, tmp_path, *METHODS).splitlines() == [line for method in METHODS for line in (method, *expected)]
