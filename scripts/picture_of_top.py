"""Makes docs/assets/top.svg: `percore top` beside a real program with two workers."""

import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from percore._attach.programs import ProgramGone, read
from percore._monitor.views import Model
from percore._top.screen import draw

ROOT = Path(__file__).parents[1]
PROGRAM = """
import asyncio, os, sys, percore
async def fetch(url): await asyncio.sleep(0.02)
def parse(page): return sorted(page)
async def main():
    async with percore.Runner(workers=2) as runner:
        while os.getppid() > 1:
            crawl = runner.map(fetch, range(400)), runner.map(parse, [list(range(3000))] * 40)
            await asyncio.gather(*crawl)
if __name__ == "__main__": asyncio.run(main())
"""


def running(script: Path) -> subprocess.Popen[bytes]:
    """Start the program."""
    script.write_text(PROGRAM)
    return subprocess.Popen([sys.executable, str(script)])


def main() -> None:
    """Watch the program for some seconds, and draw the last view."""
    with TemporaryDirectory() as folder, running(Path(folder) / "crawl.py") as program:
        try:
            model = Model(program.pid)
            for _ in range(16):
                time.sleep(0.3)
                with suppress(ProgramGone):
                    view = model.view(read(program.pid))
        finally:
            program.terminate()
    with open(os.devnull, "w") as nowhere:
        console = Console(width=132, record=True, file=nowhere, force_terminal=True)
        console.print(draw(view, 132, "calls/s", by_worker=True))
        picture = console.export_svg(title=f"percore top {program.pid}")
    # Without the fonts of another site: the reader's own will do.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    (ROOT / "docs" / "assets" / "top.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
