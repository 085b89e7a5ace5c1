"""percore.opentelemetry without its library, and what importing percore loads of it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import percore


def test_without_opentelemetry_the_import_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    path = Path(percore.__file__).parent / "opentelemetry.py"
    spec = importlib.util.spec_from_file_location("percore_without_opentelemetry", path)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"percore\.opentelemetry needs OpenTelemetry: pip install percore\[otel\]"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_percore_alone_imports_nothing_of_it() -> None:
    code = (
        "import asyncio, sys, percore\n"
        "async def main():\n"
        "    async with percore.Runner(workers=1) as runner:\n"
        "        return await runner.run(sorted, list(sys.modules)), await runner.run(eval, 'list(__import__(\"sys\").modules)')\n"
        "names = {name for names in asyncio.run(main()) for name in names} | set(sys.modules)\n"
        "print([name for name in names if 'opentelemetry' in name])\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
