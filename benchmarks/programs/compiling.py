"""The function of the row short_programs. A formatter imports no asyncio, so neither does this module."""


def compiled(path: str) -> int:
    """Compile a module, and return the number of its constants."""
    with open(path, "rb") as file:
        return len(compile(file.read(), path, "exec", dont_inherit=True).co_consts)
