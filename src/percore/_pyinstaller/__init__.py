"""For PyInstaller, which asks by the entry point `pyinstaller40` where the hooks of this package are."""

import os


def get_hook_dirs() -> list[str]:
    """The folder of `hook-percore.py`."""
    return [os.path.dirname(__file__)]
