"""percore imports most of its modules by name, where PyInstaller does not see it."""

from PyInstaller.utils.hooks import collect_submodules

hiddenimports = collect_submodules("percore", filter=lambda name: not name.startswith("percore._pyinstaller"))
