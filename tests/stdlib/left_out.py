"""Tests of CPython's that LoopPoolExecutor does not pass, each with its reason. One that passes must leave this list."""

from typing import NamedTuple


class LeftOut(NamedTuple):
    """A test, by its name.

    Attributes:
        methods: start methods under which it is left out; None: all.
        part: what its full name contains, where several have this name.
    """

    test: str
    reason: str
    methods: tuple[str, ...] | None = None
    part: str = ""


_BY_NAME = "imports the class by its name from concurrent.futures; tests/e2e/test_executor_ends.py has our own copy"
_FORCE = "calls or replaces the private _force_shutdown; tests/e2e/test_executor_workers.py has terminate_workers and kill_workers"
_COLLECTED = "wants futures to fail when the executor is collected; a replacement runs their calls: tests/e2e/test_executor_ends.py"

LEFT_OUT: tuple[LeftOut, ...] = (
    LeftOut("test_interpreter_shutdown", _BY_NAME),
    LeftOut("test_submit_after_interpreter_shutdown", _BY_NAME),
    LeftOut("test_hang_gh83386", _BY_NAME),
    LeftOut(
        "test_max_tasks_per_child_defaults_to_spawn_context",
        "looks at the private _mp_context: without a context workers come from percore's own fork server, which needs no other",
    ),
    LeftOut(
        "test_python_finalization_error",
        "forbids all threads but the first, so that the queue's feeder fails; an executor of percore has no second thread, and "
        "only a worker that is forked from the program would be refused one",
        ("forkserver", "spawn"),
    ),
    LeftOut(
        "test_idle_process_reuse_one",
        "counts the private _processes: all workers start with the first call, not one by one",
        ("forkserver", "spawn"),
    ),
    LeftOut(
        "test_idle_process_reuse_multiple",
        "counts the private _processes: all workers start with the first call, not one by one",
        ("forkserver", "spawn"),
    ),
    LeftOut(
        "test_processes_terminate",
        "counts the private _processes: all workers start with the first call, not one by one",
        ("forkserver", "spawn"),
    ),
    LeftOut("test_terminate_workers", _FORCE),
    LeftOut("test_kill_workers", _FORCE),
    LeftOut("test_force_shutdown_workers_invalid_op", _FORCE),
    LeftOut(
        "test_force_shutdown_workers",
        "replaces terminate and kill of a process in the private _processes, by which percore does not end its workers",
    ),
    LeftOut(
        "test_failed_worker_replacement_breaks_pool",
        "replaces the private _spawn_worker, so that no worker can be started; percore does not call it, and starts a replacement",
        ("forkserver", "spawn"),
    ),
    LeftOut("test_gc_during_max_tasks_worker_exit_gh152967", _COLLECTED, ("forkserver", "spawn")),
    LeftOut("test_shutdown_no_wait_max_tasks_gh119592", _COLLECTED, ("forkserver", "spawn")),
    LeftOut(
        "test_force_shutdown_during_max_tasks_worker_exit",
        "takes the private _shutdown_lock and sets the private _force_shutting_down",
        ("forkserver", "spawn"),
    ),
)
