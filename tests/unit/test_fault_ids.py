"""Every fault that percore has to survive has a test that carries its id in its name: `test_k3_...`.

The letters: K deaths of workers, P death of the supervisor, and signals, S serialisation, B boot, C cancellation, X close, misuse,
T recycling, M maps, L threads that are all taken, loops that stand still, R memory, rings and limits, V what others can do.
"""

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

NEW: dict[str, tuple[str, str]] = {
    # Nested calls
    "n1": ("a caller dies with its worker", "contract/test_nested.py::test_calls_of_a_dead_caller_end"),
    "n2": ("the worker of a nested call dies", "contract/test_nested.py::test_a_death_is_told_with_its_caller"),
    "n3": ("both are in the worker that dies", "contract/test_nested_ends.py::test_a_worker_that_dies_with_a_caller_and_its_call"),
    "n4": ("the worker of a caller retires or is reloaded", "contract/test_nested.py::test_workers_that_retire_get_their_answers"),
    "n5": ("callers want each other's keys", "contract/test_nested_walks.py::test_callers_that_want_each_others_keys_get_an_error"),
    "n6": ("the same, as their worker leaves", "contract/test_nested_walks.py::test_callers_whose_worker_leaves_get_an_error"),
    "n7": ("the runner closes over callers", "contract/test_nested.py::test_a_close_cuts_callers_and_their_calls"),
    # Generators
    "g1": (
        "a worker dies in the middle of a stream",
        "contract/test_stream_ends.py::test_a_death_gives_what_was_sent_then_worker_died",
    ),
    "g2": ("a consumer leaves", "contract/test_stream_ends.py::test_a_consumer_that_leaves_closes_the_generator"),
    "g3": (
        "a generator ignores its end",
        "contract/test_stream_ends.py::test_a_generator_that_swallows_its_cancellation_is_closed_when_it_yields",
    ),
    "g4": ("its worker drains, as in a reload", "contract/test_stream_ends.py::test_a_worker_that_drains_ends_its_streams_first"),
    "g5": (
        "it has not begun when its worker leaves",
        "contract/test_stream_ends.py::test_a_stream_that_has_not_begun_moves_to_another_worker",
    ),
    "g6": ("slow consumers", "contract/test_streams.py::test_slow_consumers_hold_up_nothing_but_their_streams"),
    "g7": (
        "the program is forked while a stream is open",
        "contract/test_stream_ends.py::test_a_forked_child_leaves_the_stream_alone",
    ),
    # Allowances: rates
    "a1": ("workers die under a rate", "contract/test_rates.py::test_the_rate_holds_though_workers_die"),
    "a2": ("retries under a rate", "contract/test_rates.py::test_every_attempt_counts"),
    "a3": ("a close while calls wait for their rate", "contract/test_rates.py::test_a_close_without_grace_ends_waiting_calls"),
    "a4": ("a call does not begin after all", "contract/test_rates.py::test_a_call_that_has_not_begun_is_not_counted"),
    # Changes of the pool
    "h1": ("deaths during a reload", "contract/test_reload_and_resize.py::test_deaths_during_a_reload"),
    "h2": (
        "a new worker cannot start",
        "contract/test_reload_and_resize.py::test_a_reload_whose_new_worker_cannot_start_raises_and_leaves_the_old_ones",
    ),
    "h3": ("a close during a reload", "contract/test_reload_and_resize.py::test_a_close_ends_a_reload_and_those_that_wait"),
    "h4": (
        "a cancelled change",
        "contract/test_reload_and_resize.py::test_a_cancelled_resize_leaves_as_many_workers_as_there_were",
    ),
    "h5": (
        "a broadcast during a reload",
        "contract/test_reload_and_resize.py::test_a_broadcast_that_an_old_worker_has_not_begun_runs_in_the_new_one",
    ),
    "h6": ("SIGTERM during a reload", "contract/test_reload_and_resize.py::test_a_worker_asked_to_end_while_it_is_reloaded"),
    "h7": (
        "hard_timeout, streams, keys and all else in any order",
        "unit/test_call_orders.py::test_in_random_histories_each_call_ends_and_is_told_the_truth",
    ),
    "h8": (
        "the same, with real workers",
        "e2e/test_histories.py::test_histories_of_the_explorer_end_as_they_must_with_real_workers",
    ),
    # Sockets
    "w1": ("a worker that serves is killed", "contract/test_listen.py::test_a_killed_worker_costs_only_what_it_holds"),
    "w2": ("a resize to fewer, with requests", "contract/test_listen.py::test_a_request_in_a_removed_worker_is_answered"),
    "w3": ("a slot is given up", "contract/test_listen.py::test_a_slot_that_is_given_up_has_no_connections"),
    "w4": ("a start that fails", "contract/test_listen.py::test_a_start_that_fails_leaves_the_address_free"),
    # Threads
    "o1": ("a worker does not end", "contract/test_threads_engine.py::test_a_worker_that_does_not_end_is_given_up"),
    "o2": ("the same, as the runner closes", "contract/test_threads_engine.py::test_a_close_gives_up_what_does_not_end"),
    "o3": ("kills at any moment", "contract/test_threads_engine.py::test_kills_at_any_moment_lose_no_call_and_run_none_twice"),
    # Nodes
    "d1": ("a node is lost", "contract/test_nodes.py::test_a_lost_node_ends_its_calls_and_its_slots_move"),
    "d2": ("a host freezes and thaws", "e2e/test_nodes.py::test_a_frozen_host_is_lost_and_its_workers_end_when_it_thaws"),
    "d3": ("a node is lost during a reload", "contract/test_nodes.py::test_d3_a_node_is_lost_in_the_middle_of_a_reload"),
    "d4": ("a peer sends what nobody should send", "unit/test_wire_fuzz.py::test_the_program_drops_a_host_that_is_broken"),
    "d5": ("no node is left", "e2e/test_nodes.py::test_calls_wait_for_a_node_when_none_is_left"),
    "d6": ("the program dies", "e2e/test_nodes.py::test_the_death_of_the_program_ends_everything"),
    "d7": (
        "the clocks of two machines run apart",
        "contract/test_nodes.py::test_a_host_whose_clock_has_gained_half_a_minute_begins_calls_in_time",
    ),
    "d8": ("a machine is suspended", "unit/test_station.py::test_a_host_knows_of_a_suspended_machine_with_the_next_beat"),
    "d9": ("a close is cancelled", "contract/test_nodes.py::test_a_close_that_asyncio_run_cancels_leaves_nothing"),
    # Views from outside
    "e1": ("the program that is watched stops", "e2e/test_top.py::test_a_stopped_program_is_told_as_blocked"),
    "e2": ("a viewer of the dashboard leaves", "e2e/test_web.py::test_a_stream_of_snapshots_ends_when_the_viewer_has_gone"),
    "e3": (
        "a closed program is watched",
        "e2e/test_hardening.py::test_v10_a_hardened_program_is_closed_to_its_own_user_and_a_plain_one_to_other_users",
    ),
    "e4": ("a page of a runner is half written", "unit/test_page.py::test_half_a_write_is_no_page"),
    "e5": (
        "another site, or a page without actions, asks the dashboard to act",
        "e2e/test_web.py::test_a_worker_is_recycled_by_the_page_alone",
    ),
    "e6": ("arguments in metrics and statistics", "e2e/test_web.py::test_metrics_are_what_prometheus_reads"),
    "e7": (
        "a worker that is asked to end has ended",
        "e2e/test_web.py::test_a_worker_that_ends_just_before_it_is_asked_to_is_no_error",
    ),
    # Scale: closes, deaths and changes while very many calls wait
    "y1": ("many calls wait", "unit/test_growth.py::test_no_step_takes_longer_because_many_calls_wait"),
    "y2": (
        "they end in pieces, between which anything happens",
        "unit/test_growth.py::test_calls_that_wait_at_a_close_end_in_pieces_whatever_happens_between_them",
    ),
    "y3": ("streams that are left", "unit/test_growth.py::test_nothing_grows_with_streams_that_are_left"),
    # Lies of a fork server
    "z1": ("a report that is none", "unit/test_fork_server_lies.py::test_v9_what_is_no_report_ends_the_launch"),
    "z2": (
        "a descriptor that is no pidfd",
        "unit/test_fork_server_lies.py::test_v9_a_descriptor_that_is_no_pidfd_watches_nothing",
    ),
    "z3": ("any of them", "unit/test_fork_server_lies.py::test_v9_any_reports_end_a_launch_once"),
}
"""The faults of the newer parts, each with what happens and the test that has it: here the rows name the tests."""

OTHERS: dict[str, tuple[str, str]] = {
    "r10": ("a system without pidfds", "e2e/test_launch.py::test_exit_codes_without_what_other_systems_lack_in_silence"),
    "l1": ("a blocked loop", "contract/test_blocked_loops.py::test_a_blocked_loop_is_reported_with_its_stack_and_its_end"),
    "l2": ("C code that holds the GIL", "contract/test_blocked_loops.py::test_c_code_that_holds_the_gil_is_shown_by_its_caller"),
    "t1": ("the clock of the wall jumps: nobody reads it", "unit/test_layers.py::test_never_reads_the_wall_clock"),
    "m4": ("a stream is left half-way", "contract/test_stream_ends.py::test_aclose_waits_for_the_remote_finally"),
    "m5": ("a death in a stream", "contract/test_stream_ends.py::test_a_death_gives_what_was_sent_then_worker_died"),
    "v1": ("nothing listens", "e2e/test_security.py::test_nothing_of_a_runner_has_a_name_listens_or_shows_arguments"),
    "v2": ("nothing has a name", "e2e/test_security.py::test_nothing_of_a_runner_has_a_name_listens_or_shows_arguments"),
    "v3": ("memory is sealed", "unit/test_memory.py::test_nobody_can_change_the_size"),
    "v4": ("descriptors of forks", "e2e/test_security.py::test_a_fork_of_the_program_holds_no_bells_and_processes"),
    "v5": ("a hostile working directory", "e2e/test_security.py::test_no_module_comes_from_the_working_directory"),
    "v6": ("arguments and environments", "e2e/test_security.py::test_nothing_of_a_runner_has_a_name_listens_or_shows_arguments"),
    "v7": ("core dumps", "e2e/test_security.py::test_nothing_of_a_runner_has_a_name_listens_or_shows_arguments"),
    "v8": ("bytes of others", "unit/test_memory.py::test_new_memory_is_zero_and_holds_what_is_written"),
    "v12": ("logs", "e2e/test_security.py::test_nothing_of_a_runner_has_a_name_listens_or_shows_arguments"),
}
"""Faults of the catalogue whose tests have other names."""

IDS = [
    *(
        f"{letter}{number}"
        for letter, last in {"k": 16, "p": 9, "s": 8, "b": 5, "c": 6, "x": 7, "m": 3, "r": 8}.items()
        for number in range(1, last + 1)
    ),
    "t2",
    "t3",
    "t4",
    "l3",
    "l4",
    "l5",
    "r9",
    "v9",
    "v10",
    "v11",
    "v13",
]


@cache
def carried() -> Counter[str]:
    """How many tests carry each id."""
    name = re.compile(r"^ *(?:async )?def test_([a-z]\d+)_", re.MULTILINE)
    return Counter(found for path in TESTS.rglob("test_*.py") for found in name.findall(path.read_text()))


def test_each_fault_has_a_test(subtests: pytest.Subtests) -> None:
    for fault in IDS:
        with subtests.test(fault=fault):
            assert carried()[fault] > 0


def test_no_test_carries_an_id_that_does_not_exist() -> None:
    assert set(carried()) <= {*IDS, *NEW, *OTHERS}


def test_each_fault_that_names_its_test_has_it(subtests: pytest.Subtests) -> None:
    for fault, (_, node) in (OTHERS | NEW).items():
        file, _, name = node.partition("::")
        with subtests.test(fault=fault):
            assert re.search(rf"^ *(async )?def {name}\(", (TESTS / file).read_text(), re.MULTILINE)
