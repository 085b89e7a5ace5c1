"""The polite crawler on a Ray cluster of two nodes, one of which is killed half-way.

    make demo-ray

It starts the cluster on this machine, crawls the farm of 64 sites (farm.py) from both nodes, and kills all processes of the
second one, as if its machine had lost power. No call is retried. Each call writes its number into a file when it begins. So at the
end this program counts from outside what became of the calls: done, failed and by which exception, sent to another node, run twice.

Ray listens on every interface. `make demo-ray` runs this in a network of loopback alone.
"""

import asyncio
import tempfile
from collections import Counter
from itertools import count
from pathlib import Path
from typing import Any

import psutil

import percore
from crawl.frontier import Frontier, Visit, crawl
from crawl.pages import Page, RobotsFile, fetch_page, fetch_robots, http
from crawl.robots import read_rules
from farm import Farm, new_event_loop

CPUS = 2
PER_HOST = 4
DEPTH = 3
PAGES = 600
"""After half of these pages the node is killed, and after all of them the crawl ends."""


async def began(file: str, number: int, url: str, is_robots: bool) -> Page | RobotsFile:
    """Note that this call has begun, and where. Then fetch."""
    note(file, f"{number} {percore.current_worker().node}")
    return await (fetch_robots if is_robots else fetch_page)(url)


def note(file: str, line: str) -> None:
    with open(file, "a") as ledger:
        ledger.write(line + "\n")


class Crawl:
    """The crawl, and what became of its calls."""

    def __init__(self, runner: percore.Runner, starts: list[str], ledger: Path) -> None:
        self.runner = runner
        self.ledger = ledger
        self.frontier = Frontier(starts, depth=DEPTH, at_once=2 * PER_HOST)
        self.numbers = count(1)
        self.under_way: set[int] = set()
        self.done = 0
        self.failed: Counter[str] = Counter()
        self.half_way = asyncio.Event()

    async def visit(self, visit: Visit) -> None:
        if self.done >= PAGES:
            return
        if visit.is_robots:
            self.frontier.learn(visit, await read_rules(self.robots, visit))
            return
        try:
            page = await self._call(visit)
        except Exception as error:
            self.failed[type(error).__name__] += 1
            return
        assert isinstance(page, Page)
        self.done += 1
        self.frontier.follow(page, visit.depth)
        if self.done == PAGES // 2:
            self.half_way.set()

    async def robots(self, visit: Visit) -> RobotsFile:
        file = await self._call(visit)
        assert isinstance(file, RobotsFile)
        return file

    async def _call(self, visit: Visit) -> Page | RobotsFile:
        number = next(self.numbers)
        self.under_way.add(number)
        polite = self.runner.options(key=visit.host, timeout=20)
        try:
            return await polite.run(began, str(self.ledger), number, visit.url, visit.is_robots)
        finally:
            self.under_way.discard(number)

    def begun(self) -> dict[int, list[str]]:
        """The nodes on which each call has begun."""
        found: dict[int, list[str]] = {}
        for line in self.ledger.read_text().splitlines():
            number, node = line.split()
            found.setdefault(int(number), []).append(node)
        return found


def kill(node: Any) -> None:
    """Kill Ray's processes of a node, and all that they have started there."""
    (raylet,) = node.all_processes["raylet"]
    process = psutil.Process(raylet.process.pid)
    for each in [process, *process.children(recursive=True)]:
        each.kill()


async def crawl_and_kill(cluster: Any, node: Any, starts: list[str], ledger: Path) -> None:
    engine = percore.RayEngine(cluster.address)
    async with percore.Runner(lifespan=http, per_key=PER_HOST, engine=engine) as runner:
        workers = runner.statistics().workers
        victim = next(worker.node for worker in workers if worker.node and worker.node.endswith(node.node_id[:6]))
        print(f"{len(workers)} workers on {len({worker.node for worker in workers})} nodes; crawling ...")
        one = Crawl(runner, starts, ledger)
        crawling = asyncio.create_task(crawl(one.frontier, one.visit, at_once=200))
        crawling.add_done_callback(lambda _: one.half_way.set())
        await one.half_way.wait()
        kill(node)
        waiting, before = set(one.under_way), one.begun()
        print(f"{one.done} pages done; killed node {victim}, with {len(waiting)} calls under way in all")
        await crawling
        after = one.begun()
        there = {number for number in waiting if victim in before.get(number, ())}
        moved = [number for number in waiting if number not in before and after.get(number)]
        print(f"calls done: {one.done}")
        print("calls failed: " + ", ".join(f"{name} {times}" for name, times in one.failed.most_common()))
        print(f"of those under way: begun on the killed node {len(there)}, not sent yet and sent elsewhere {len(moved)}")
        print(f"calls run twice: {sum(len(nodes) > 1 for nodes in after.values())}")


def main() -> None:
    import ray  # not at the top: workers import this script
    from ray.cluster_utils import Cluster

    print("Starting a Ray cluster of two nodes, and a farm of 64 sites, on this machine ...")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
    try:
        node = cluster.add_node(num_cpus=CPUS)
        with Farm() as farm, tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=new_event_loop) as loop:
            ledger = Path(folder, "begun")
            ledger.touch()
            ray.init(cluster.address, log_to_driver=False, configure_logging=False)  # else the killed raylet's log would be shown
            loop.run(crawl_and_kill(cluster, node, farm.starts, ledger))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
