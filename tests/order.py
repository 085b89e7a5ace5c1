"""The order of the files in a run by several processes: those that take longest come first.

`--dist loadfile` gives each process whole files, in this order. A long one that came last would leave the other processes idle.
"""

from typing import Final

import pytest

LONGEST: Final = (
    *("e2e/test_buffers", "contract/test_reload_and_resize", "e2e/test_launch"),
    *("e2e/test_limits", "contract/test_max_memory", "contract/test_batches", "contract/test_deaths"),
    *("contract/test_nested_walks", "e2e/test_launch_styles", "e2e/test_deaths", "contract/test_recycling"),
    *("e2e/test_interrupts", "e2e/test_restarts", "e2e/test_executor_ends", "contract/test_rates"),
    *("contract/test_buffers", "unit/test_dispatch", "e2e/test_executor_workers", "e2e/test_containers"),
    *("contract/test_payloads", "e2e/test_simulate", "contract/test_listen", "contract/test_peers_recycling"),
    *("contract/test_map_ends", "contract/test_closing", "e2e/test_top", "e2e/test_misuse"),
    *("e2e/test_hosts", "contract/test_retries", "e2e/test_multiprocessing", "contract/test_streams"),
    *("e2e/test_around_calls", "contract/test_inside", "e2e/test_supervisor_death", "contract/test_nested", "contract/test_keys"),
    *("unit/test_keys", "unit/test_layers", "contract/test_lives", "contract/test_timeouts", "contract/test_share"),
    *("contract/test_hard_timeout", "unit/test_usage", "contract/test_storms", "contract/test_stream_ends"),
    *("contract/test_calls", "contract/test_logs", "contract/test_sentences", "unit/test_once_more"),
    *("e2e/test_forks_of_the_program", "e2e/test_judged_deaths", "e2e/test_record", "e2e/test_nodes"),
    *("contract/test_cancellation"),
)
"""By the seconds that they take, the longest first; where a file has moved, the list is only less good. Others follow."""

_PLACES: Final = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The same tests, file by file; within a file they stay in their order."""
    return sorted(items, key=lambda item: _PLACES.get(item.nodeid.partition("::")[0], len(_PLACES)))
