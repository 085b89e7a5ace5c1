"""The order of the files in a run by several processes: those that take longest come first.

`--dist loadfile` gives each process whole files, in this order. A long one that came last would leave the other processes idle.
"""

from typing import Final

import pytest

LONGEST: Final = (
    *("e2e/test_interrupts", "e2e/test_misuse", "e2e/test_limits", "e2e/test_top", "e2e/test_restarts"),
    *("e2e/test_launch_styles", "contract/test_timeouts", "e2e/test_containers", "contract/test_hard_timeout"),
    *("e2e/test_launch", "e2e/test_buffers", "e2e/test_exits", "contract/test_reload_and_resize"),
    *("e2e/test_fork_server_deaths", "contract/test_max_memory", "e2e/test_top_tmux", "contract/test_closing"),
    *("contract/test_rates", "e2e/test_executor_ends", "contract/test_nested_walks", "contract/test_share"),
    *("e2e/test_deaths", "contract/test_recycling", "contract/test_batches", "contract/test_buffers", "e2e/test_hosts"),
    *("contract/test_peers_recycling", "e2e/test_judged_deaths", "contract/test_deaths", "e2e/test_testing"),
    *("contract/test_map_ends", "contract/test_nested", "e2e/test_nodes", "e2e/test_executor_workers"),
    *("contract/test_streams", "contract/test_publication", "e2e/test_supervisor_death", "contract/test_queue_timeout"),
    *("contract/test_retries", "e2e/test_around_calls", "contract/test_payloads", "e2e/test_multiprocessing"),
    *("contract/test_serialisation", "contract/test_usage", "contract/test_keys", "unit/test_keys", "contract/test_storms"),
    *("contract/test_contextvars", "unit/test_portal", "contract/test_map", "unit/test_dispatch", "e2e/test_simulate"),
    *("contract/test_lives", "contract/test_reentrancy", "e2e/test_record", "unit/test_layers", "e2e/test_boot"),
    *("contract/test_stream_ends", "contract/test_sentences", "contract/test_broadcast", "e2e/test_executor_calls"),
    *("contract/test_nested_ends", "e2e/test_logs", "e2e/test_chaos"),
)
"""By the seconds that they take, the longest first; where a file has moved, the list is only less good. Others follow."""

_PLACES: Final = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}


def longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """The same tests, file by file; within a file they stay in their order."""
    return sorted(items, key=lambda item: _PLACES.get(item.nodeid.partition("::")[0], len(_PLACES)))
