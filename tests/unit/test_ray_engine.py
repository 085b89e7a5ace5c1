"""RayEngine: what it refuses when it is made, and how workers are dealt to nodes. A cluster is in tests/ray."""

import sys
import threading
from concurrent.futures import Future
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from percore import RayEngine, Runner
from percore._engines.nodes.places import Place, dealt
from percore._places import ray_connection, ray_engine
from percore._places.ray import RayPlaces
from percore._places.ray_connection import THREAD, RayConnection
from percore._places.ray_nodes import Node, Wanted
from tests.waiting import until

engines: Any = RayEngine


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_engine, "find_spec", lambda _name: True)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_it_says_how_to_install_it() -> None:
    with pytest.raises(ImportError, match=r'^RayEngine needs Ray: pip install "percore\[ray\]"$'):
        RayEngine()


@pytest.mark.usefixtures("installed")
def test_an_engine_is_validated_when_it_is_made(subtests: pytest.Subtests) -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"address": 6379}, TypeError, "address must be a text, not 6379"),
        ({"address": None}, TypeError, "address must be a text, not None"),
        ({"namespace": b"n"}, TypeError, "namespace must be a text, not b'n'"),
        (
            {"address": "ray://head:10001"},
            ValueError,
            r"RayEngine cannot use a Ray client \(ray://head:10001\): its program must run on",
        ),
        ({"workers_per_node": 0}, ValueError, "workers_per_node must be from 1 to 1024, not 0"),
        ({"resources": ["GPU"]}, TypeError, r"resources must be a dict, such as \{\"GPU\": 1\}, not \['GPU'\]"),
        (
            {"resources": {"GPU": 0}},
            ValueError,
            r"resources must be positive numbers by name, such as \{\"GPU\": 1\}, not \{'GPU': 0\}",
        ),
        ({"resources": {"CPU": 2}}, ValueError, "resources cannot contain CPU: each host takes as many CPUs as it has workers"),
        ({"runtime_env": "."}, TypeError, r"runtime_env must be a dict, such as \{\"working_dir\": \".\"\}, not '.'"),
        ({"lost_after": 0}, ValueError, "lost_after must be a positive number of seconds, not 0"),
    ]
    for settings, error, text in cases:
        with subtests.test(settings=str(settings)), pytest.raises(error, match=f"^{text}"):
            engines(**settings)
    assert repr(RayEngine("10.0.0.1:6379")) == "percore.RayEngine('10.0.0.1:6379')"
    with pytest.raises(ValueError, match=r"^listen=\.\.\. needs workers on this machine"):
        Runner(engine=RayEngine(), listen=["127.0.0.1:0"])
    with pytest.raises(ValueError, match=r"^harden=True closes processes of this machine"):
        Runner(engine=RayEngine(), harden=True)


class FakeRay(ModuleType):
    """What percore uses of Ray, without a cluster."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = SimpleNamespace(RayError=type("RayError", (Exception,), {}))
        self.killed: list[object] = []
        self.kill = self.killed.append


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


async def test_a_node_whose_actor_does_not_start_costs_no_other_node(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search would find it again: the runner would have no node for ever."""
    connection = RayConnection("auto", None)
    places = RayPlaces(connection, Wanted(None, {}, None), 0.1)
    answers: list[Future[int | None]] = [Future(), Future()]
    answers[1].set_result(4321)

    async def free(_used: object) -> list[Node]:
        return [Node("1", "one", "10.0.0.1", 1), Node("2", "two", "10.0.0.2", 1)]

    def keep(_wanted: object, _token: bytes, keepers: list[Any]) -> list[Any]:
        keepers += ["keeper of one", "keeper of two"]
        places._keepers += keepers
        return [SimpleNamespace(future=lambda answer=answer: answer) for answer in answers]

    monkeypatch.setattr(places._nodes, "free", free)
    monkeypatch.setattr(places, "_keep", keep)
    late, two = await places.place(bytes(32), (), 2)
    assert str(late) == "node one (10.0.0.1) could not start a host within 0.1 s: see its actor in `ray list actors`"
    assert isinstance(two, Place)
    assert (two.node, two.port) == ("two", 4321)
    await until(lambda: ray.killed == ["keeper of one"])
    await places.aclose()
    assert ray.killed == ["keeper of one", "keeper of two"]


@pytest.mark.usefixtures("ray")
async def test_a_ray_that_does_not_disconnect_stops_no_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    connection = RayConnection("auto", None)
    monkeypatch.setattr(ray_connection, "_CLOSE", 0.01)
    monkeypatch.setattr(ray_connection, "_users", [connection])
    with ray_connection._lock:  # as an `open` of another runner does, whose cluster does not answer
        await connection.aclose()
    assert "Ray did not disconnect this program within 0.01 s" in caplog.messages[0]
    await until(lambda: THREAD not in [thread.name for thread in threading.enumerate()])


def test_workers_are_dealt_to_nodes_in_turn() -> None:
    for workers, most, shares in [
        (1, [2, 2], [1, 0]),
        (3, [2, 2], [2, 1]),
        (5, [1, 8], [1, 4]),
        (9, [1, 8], [1, 8]),
        (20, [1, 8], [1, 8]),  # too few CPUs: each node gets its most, and they are weights
        (2, [], []),
    ]:
        assert dealt(workers, most) == shares
