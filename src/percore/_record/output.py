"""Writes a recording: as one HTML file with a flame graph, which needs no network, or as JSON for speedscope."""

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import percore
from percore._record.recorder import Recording
from percore._record.tree import by_call, by_function, by_worker

if TYPE_CHECKING:
    from percore._record.samples import Frame

_DATA: Final = "/*RECORDING*/null"
_LEAST: Final = 2000
"""A frame with less than this part of all samples is narrower than a pixel, and left out of the HTML."""


def as_html(recording: Recording) -> str:
    """Return a page with the recording by function, by worker and by call."""
    trees = [by_function(recording).plain(), by_worker(recording).plain(), by_call(recording.calls()).plain()]
    for tree in trees:
        _prune(tree, tree["count"] / _LEAST)
    data = {
        "program": recording.name,
        "pid": recording.pid,
        "sampler": recording.sampler,
        "seconds": round(recording.seconds, 1),
        "rounds": recording.rounds,
        "trees": trees,
    }
    # A name may hold what ends a script: in JSON `<` may be written as an escape, and so no name is markup.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return files(percore).joinpath("_record", "flame.html").read_text(encoding="utf-8").replace(_DATA, text, 1)


def _prune(node: dict[str, Any], least: float) -> None:
    node["above"] = [one for one in node["above"] if one["count"] >= least]
    for one in node["above"]:
        _prune(one, least)


def as_speedscope(recording: Recording) -> str:
    """Return the recording as https://www.speedscope.app opens it: a profile for each worker, in samples."""
    frames: dict[Frame, int] = {}
    profiles: dict[str, dict[str, Any]] = {}
    for worker, stack, count, _ in recording:
        path = [frames.setdefault(frame, len(frames)) for frame in stack]
        profile = profiles.setdefault(worker, _profile(worker))
        profile["samples"].append(path)
        profile["weights"].append(count)
        profile["endValue"] += count
    shared = [{"name": frame.name, "file": frame.file} if frame.file else {"name": frame.name} for frame in frames]
    return json.dumps(
        {
            "$schema": "https://www.speedscope.app/file-format-schema.json",
            "shared": {"frames": shared},
            "profiles": [profiles[worker] for worker in sorted(profiles)],
            "name": f"{recording.name or 'python'} ({recording.pid})",
            "exporter": f"percore {percore.__version__}",
        }
    )


def _profile(worker: str) -> dict[str, Any]:
    return {"type": "sampled", "name": worker, "unit": "none", "startValue": 0, "endValue": 0, "samples": [], "weights": []}
