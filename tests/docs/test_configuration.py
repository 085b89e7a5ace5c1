"""The blocks of the pages that configure other programs: YAML, TOML and Dockerfiles. No test starts a container."""

import inspect
import json
import re
import tomllib
from importlib import import_module
from typing import Any

import percore
from tests.docs.blocks import DOCS, Block, blocks_of, pages

_INSTRUCTION = re.compile(r"(?P<name>[A-Z]+) (?P<text>.+)")


def _titled(page: str, title: str) -> Block:
    (block,) = (block for block in blocks_of(DOCS / page) if block.title == title)
    return block


def test_each_block_is_in_its_language() -> None:
    yaml: Any = import_module("yaml")
    for page in pages():
        for block in blocks_of(page):
            if block.language == "yaml":
                assert list(yaml.safe_load_all(block.text)), block
            elif block.language == "toml":
                assert tomllib.loads(block.text), block


def test_the_deployment_selects_its_own_pods_and_gives_them_time_to_stop() -> None:
    yaml: Any = import_module("yaml")
    deployment = yaml.safe_load(_titled("how-to/containers.md", "deployment.yaml").text)
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    template = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert all(isinstance(container["image"], str) for container in template["spec"]["containers"])
    grace = re.search(r"aclose\(grace=(\d+)\)", _titled("how-to/containers.md", "service.py").text)
    assert grace is not None
    kill_after = inspect.signature(percore.Runner).parameters["kill_after"].default
    assert template["spec"]["terminationGracePeriodSeconds"] > int(grace[1]) + kill_after


def test_the_dockerfile_has_known_instructions_and_starts_no_shell() -> None:
    """A shell as process 1 does not pass SIGTERM on."""
    found = [_INSTRUCTION.fullmatch(line) for line in _titled("how-to/containers.md", "Dockerfile").text.splitlines()]
    instructions = [(one["name"], one["text"]) for one in found if one is not None]
    assert len(instructions) == len(found)
    assert {name for name, _ in instructions} <= {"FROM", "COPY", "RUN", "USER", "CMD", "ENV", "WORKDIR"}
    assert instructions[0][0] == "FROM"
    assert json.loads(dict(instructions)["CMD"]) == ["python", "/app/service.py"]
