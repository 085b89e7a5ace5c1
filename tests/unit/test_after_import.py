"""What runs right after the import of a module, however often its spec was asked for before."""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from percore._worker_process.multiprocessing_state import AfterImport


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "stepped.py").write_text("import sys\nif getattr(sys, 'refuses', False):\n    raise ImportError('not now')\n")
    return "stepped"


def test_the_step_runs_once_after_the_import(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code may ask whether there is such a module and not import it, and an import may fail and be tried again."""
    ran: list[Any] = []
    monkeypatch.setattr(sys, "meta_path", [AfterImport({module: ran.append}), *sys.meta_path])
    assert find_spec(module) is not None
    monkeypatch.setattr(sys, "refuses", True, raising=False)
    with pytest.raises(ImportError, match="not now"):
        importlib.import_module(module)
    assert ran == []
    monkeypatch.setattr(sys, "refuses", False)
    found = importlib.import_module(module)
    assert ran == [found]
    assert found.__spec__ is not None
    assert type(found.__spec__.loader) is type(found.__loader__)
    importlib.reload(found)
    assert ran == [found]
    del sys.modules[module]
