"""Starts a Ray cluster of two nodes and runs pytest beside it: `python -m tests.ray.cluster ARGUMENTS OF PYTEST`.

The cluster belongs to no test: what Ray starts is neither a child of the tests nor left behind by one. A test asks for another
node, or the death of one, by a line on a socket. The variable PERCORE_TEST_RAY has the address, and the socket's descriptor.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from ray.cluster_utils import Cluster

NODES = 2
CPUS = 2
VARIABLE = "PERCORE_TEST_RAY"


def main() -> int:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
    nodes: dict[str, Any] = {}
    for _ in range(NODES - 1):
        cluster.add_node(num_cpus=CPUS)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "pytest", *sys.argv[1:]]
    place = json.dumps([cluster.address, theirs.fileno()])
    tests = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=os.environ | {VARIABLE: place})
    theirs.close()
    with ours, ours.makefile("rw") as lines:
        for line in lines:
            print(json.dumps(done(cluster, nodes, *json.loads(line))), file=lines, flush=True)
    status = tests.wait()
    cluster.shutdown()
    return status


def done(cluster: Cluster, nodes: dict[str, Any], order: str, value: Any) -> Any:
    if order == "add":
        node = cluster.add_node(**value)
        nodes[node.node_id] = node
        return node.node_id
    if order == "kill":
        os.kill(raylet_of(nodes[value]), signal.SIGKILL)
    else:
        cluster.remove_node(nodes.pop(value), allow_graceful=False)
    return None


def raylet_of(node: Any) -> int:
    [raylet] = node.all_processes["raylet"]
    return int(raylet.process.pid)


if __name__ == "__main__":
    sys.exit(main())
