"""Workers killed at random under mixed load, judged from outside.

Every call enters itself in a ledger with one write before it does anything else; the program under test writes what became of
every future. Both are files, compared when everybody is dead.
"""

import json
import os
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import fault_calls as calls
from tests.faults import Program, Watch

KILLS = int(os.environ.get("PERCORE_KILLS", "200"))
SECONDS_A_KILL = 0.3


def read(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()]


def check_value(uuid: int, words: list[str]) -> None:
    """That a call's outcome is its own."""
    match words:
        case ["value", value]:
            assert int(value) == calls.answer(uuid), uuid
        case ["error", value]:
            assert int(value) == calls.answer(uuid), uuid
        case ["bytes", size, crc]:
            expected = calls.pattern(uuid, 1_000_000 + uuid % 1000)
            assert (int(size), int(crc)) == (len(expected), zlib.crc32(expected)), uuid
        case ["cancelled"] | ["died", _, _] | ["RunnerClosed", *_]:
            pass
        case _:
            pytest.fail(f"call {uuid} ended with {words}")


def judge(ledger: list[list[str]], outcomes: list[list[str]], told: dict[str, Any]) -> Counter[str]:
    entries = Counter(int(uuid) for uuid, _, _ in ledger)
    pids = {int(uuid): int(pid) for uuid, pid, _ in ledger}
    ends = Counter(int(uuid) for uuid, *_ in outcomes)
    assert set(ends) == set(range(1, told["calls"] + 1)), "every future ends"
    assert set(ends.values()) == {1}, "once"
    assert max(entries.values()) == 1, "no call runs twice"
    kinds: Counter[str] = Counter()
    for number, *words in outcomes:
        uuid = int(number)
        check_value(uuid, words)
        kinds[words[0] if words[0] != "died" else "started" if words[1] == "1" else "unstarted"] += 1
        if words[0] in ("value", "error", "bytes"):
            assert uuid in entries, f"call {uuid} has a result and never ran"
        if words[0] == "died" and words[1] == "0":
            assert uuid not in entries, f"call {uuid} had not started, says its error, and is in the ledger"
        if words[0] == "died" and words[1] == "1" and uuid in pids:
            assert int(words[2]) == pids[uuid], f"call {uuid} ran in another worker than its error says"
    return kinds


@pytest.mark.timeout(60 + SECONDS_A_KILL * KILLS)
@pytest.mark.parametrize(
    ("loop", "method", "share"), [("asyncio", "forkserver", 0.45), ("uvloop", "forkserver", 0.45), ("asyncio", "spawn", 0.1)]
)
def test_kills_under_mixed_load(loop: str, method: str, share: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kills = max(1, round(KILLS * share))
    ledger, outcomes = tmp_path / "ledger", tmp_path / "outcomes"
    seed = os.environ.get("PERCORE_SEED", "1")
    command = ["kill_workers", str(ledger), str(outcomes), seed, str(kills), loop, method]
    limit = 30 + SECONDS_A_KILL * kills
    with Watch() as everybody, Program(*command, stderr=tmp_path / "stderr", dev=True) as program:
        while (line := program.line(limit)).startswith("born"):
            everybody.add(int(line.split()[1]))
        assert line == "started", program.stderr
        for pid in program.descendants():
            everybody.add(pid)
        while (line := program.line(limit)).startswith("born"):
            everybody.add(int(line.split()[1]))
        assert line.startswith("closed"), program.stderr
        told = json.loads(line.removeprefix("closed "))
        assert everybody.wait_gone(0) == [], "close has waited for every process"
        assert program.end() == 0
        assert program.stderr == ""
    assert (told["pending"], told["arena slots left"], told["fds left"], told["threads"]) == (0, 0, [], 1)
    assert told["kills"] >= kills
    kinds = judge(read(ledger), read(outcomes), told)
    assert kinds["started"] > 0
    with capfd.disabled():
        os.write(1, f"\n{loop}, {method}: {told['kills']} kills, {told['calls']} calls: {dict(kinds)}\n".encode())
