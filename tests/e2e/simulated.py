"""A program for `percore.testing.simulate`, which prints what it has seen and when: python -m tests.e2e.simulated SEED"""

import asyncio
import logging
import sys

import percore
import percore.testing


async def fetch(number: int) -> int:
    await asyncio.sleep(number * 37 % 11 / 3)
    return number


def parse(number: int) -> int:
    return number + 1


async def main() -> list[object]:
    loop = asyncio.get_running_loop()
    seen: list[object] = []
    begun = loop.time()
    async with percore.Runner(workers=3, concurrency=4, retries=5) as runner:
        seen += [(number, round(loop.time() - begun, 9)) async for number in runner.map(fetch, range(40))]
        calls = [runner.submit(fetch, number) for number in range(30)]
        seen += [(await call, round(loop.time() - begun, 9)) for call in asyncio.as_completed(calls)]
        seen.append(await runner.run(parse, 3))
        figures = runner.statistics()
        seen.append((figures.done, figures.failed, figures.restarts))
    await asyncio.sleep(24 * 3600)
    return seen


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    sys.stdout.write(repr(percore.testing.simulate(main, seed=int(sys.argv[1]), deaths=0.2)))
