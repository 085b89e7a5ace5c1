"""The types of percore's face: pyright accepts what is right, and finds what is wrong. `make lint` asks mypy, and runs this."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def check(*command: str) -> None:
    found = {
        "PYTHONPATH": str(HERE.parents[1] / "src"),  # of an editable installation, pyright finds no py.typed
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",  # --verifytypes looks there alone
    }
    run = subprocess.run(
        [sys.executable, "-m", *command], cwd=HERE.parents[1], env=os.environ | found, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_pyright() -> None:
    pytest.importorskip("basedpyright", reason="is in the group test")  # pyright, in a wheel that brings what it runs on
    check("basedpyright", "--project", str(HERE), "--pythonpath", sys.executable)


def test_the_type_of_every_public_name_is_known() -> None:
    pytest.importorskip("basedpyright", reason="is in the group test")
    check("basedpyright", "--verifytypes", "percore", "--ignoreexternal")  # 1 unless 100 %
