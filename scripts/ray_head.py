"""A Ray cluster of two nodes on this machine, in a network of loopback alone, to try by hand.

python scripts/ray_head.py start PYTHON              # an interpreter that has Ray; tells how to run programs there
python scripts/ray_head.py run COMMAND ARGUMENTS...  # runs a program in the network of the cluster
python scripts/ray_head.py stop
"""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

LOOPBACK = Path(__file__).with_name("loopback.py")
STATE = Path(__file__).resolve().parents[1] / "build" / "ray" / "head.json"
CPUS = 2
OURS = ("HOME", "RAY_TMPDIR", "RAY_USAGE_STATS_ENABLED")


def start(python: str) -> str | None:
    """Start the cluster, which runs until `stop`."""
    if running() is not None:
        return "it runs already: make ray-stop ends it"
    process = subprocess.Popen(
        [sys.executable, str(LOOPBACK), python, __file__, "serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines = (line for line in process.stdout if line.startswith(b"{"))
    told = next(lines, None)
    if told is None:
        return "the cluster did not start"
    STATE.write_bytes(told)
    print(f"A Ray cluster of two nodes with {CPUS} CPUs each runs at {json.loads(told)['address']}, in a network of its own.")
    print(f"Run a program there:  {sys.executable} scripts/ray_head.py run {python} program.py")
    print("Its RayEngine() finds the cluster by itself. End it:  make ray-stop")
    return None


def serve() -> str | None:
    """Be the cluster, in its network."""
    from ray.cluster_utils import Cluster

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
    with suppress(SystemExit):
        cluster.add_node(num_cpus=CPUS)
        state = {"pid": os.getpid(), "address": cluster.address, **{name: os.environ[name] for name in OURS}}
        print(json.dumps(state), flush=True)
        signal.pause()
    cluster.shutdown()
    return None


def running() -> dict[str, str] | None:
    try:
        state: dict[str, str] = json.loads(STATE.read_text())
        is_ours = b"ray_head.py" in Path(f"/proc/{state['pid']}/cmdline").read_bytes()
    except OSError:
        return None
    return state if is_ours else None


def run(command: list[str]) -> str | None:
    """Run a program in the network of the cluster, instead of this one."""
    state = running()
    if state is None:
        return "no cluster runs: make ray-head starts one"
    own = {name: state[name] for name in OURS} | {"RAY_ADDRESS": state["address"]}
    enter = ["nsenter", f"--target={state['pid']}", "--user", "--net", "--preserve-credentials", "--"]
    os.execvpe(enter[0], [*enter, *command], os.environ | own)
    return None


def stop() -> str | None:
    """End the cluster, and wait for its end."""
    state = running()
    if state is None:
        return "no cluster runs"
    ended = os.pidfd_open(int(state["pid"]))
    os.kill(int(state["pid"]), signal.SIGTERM)
    select.select([ended], [], [], 60)
    STATE.unlink()
    return None


def main() -> str | None:
    match sys.argv[1:]:
        case ["start", python]:
            return start(python)
        case ["serve"]:
            return serve()
        case ["run", *command] if command:
            return run(command)
        case ["stop"]:
            return stop()
    return __doc__


if __name__ == "__main__":
    sys.exit(main())
