"""What the processes of gunicorn's dirty arbiter, of taskiq and of streaq load: a function that does nothing, in the way of each.

The address of Redis is in the environment.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

REDIS = "BENCHMARK_REDIS"
"""The environment variable with the URL of Redis."""


def dirty_app() -> type:
    """The class of gunicorn's application; its path is `benchmarks.programs.queued:Same`."""
    base: Any = importlib.import_module("gunicorn.dirty").DirtyApp

    class Same(base):  # type: ignore[misc]
        def same_plainly(self, value: object) -> object:
            return value

    return Same


def nothing(environ: object, start_response: Any) -> list[bytes]:
    """The application of the arbiter's HTTP worker, which nobody asks."""
    start_response("200 OK", [])
    return []


def of_taskiq() -> tuple[Any, Any]:
    """The broker, and the task."""
    redis: Any = importlib.import_module("taskiq_redis")
    url = os.environ[REDIS]
    broker = redis.ListQueueBroker(url).with_result_backend(redis.RedisAsyncResultBackend(url))

    async def same(value: int) -> int:
        return value

    return broker, broker.task(task_name="same")(same)


def of_streaq() -> tuple[Any, Any]:
    """The worker, and the task."""
    streaq: Any = importlib.import_module("streaq")
    worker = streaq.Worker(redis_url=os.environ[REDIS], concurrency=64)

    async def same(value: int) -> int:
        return value

    return worker, worker.task(name="same")(same)


def __getattr__(name: str) -> Any:
    """What the programs import by name, and what this process does not need."""
    if name == "Same":
        return dirty_app()
    if name == "taskiq_broker":
        return of_taskiq()[0]
    if name == "streaq_worker":
        return of_streaq()[0]
    raise AttributeError(name)
