"""The order of the files in a run by several processes: those that take longest come first.

`--dist loadfile` gives each process whole files, in this order. A long one that came last would leave the other processes idle.
"""

from typing import Final

import pytest

LONGEST: Final = (
    *(
        "e2e/test_launch",
        "e2e/test_buffers",
        "e2e/test_crawler",
        "e2e/test_interrupts",
        "e2e/test_deaths",
        "e2e/test_executor_ends",
    ),
    *("e2e/test_service", "e2e/test_around_calls", "e2e/test_pipeline", "e2e/test_examples", "e2e/test_launch_styles"),
    *("e2e/test_containers", "e2e/test_limits", "e2e/test_restarts", "e2e/test_supervisor_death", "contract/test_recycling"),
    *("contract/test_buffers", "unit/test_keys", "typing/test_typing", "contract/test_timeouts", "unit/test_portal"),
    *("e2e/test_misuse", "contract/test_share", "contract/test_closing", "contract/test_keys", "contract/test_logs"),
    *(
        "contract/test_inside",
        "contract/test_batches",
        "contract/test_deaths",
        "contract/test_payloads",
        "contract/test_cancellation",
    ),
    *("contract/test_retries", "contract/test_storms", "contract/test_calls", "contract/test_sentences", "contract/test_usage"),
    *(
        "e2e/test_stopped_workers",
        "e2e/test_exits",
        "e2e/test_images",
        "e2e/test_logs",
        "e2e/test_multiprocessing",
        "e2e/test_boot",
    ),
    *("e2e/test_hosts", "e2e/test_judged_deaths", "e2e/test_executor_workers", "unit/test_benchmarks", "unit/test_rows"),
)
"""By the seconds that they take, the longest first; where a file has moved, the list is only less good. Others follow."""

_PLACES: Final = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The same tests, file by file; within a file they stay in their order."""
    return sorted(items, key=lambda item: _PLACES.get(item.nodeid.partition("::")[0], len(_PLACES)))
