"""Names of parameters that are the same in every process, as parallel runs need."""


def steady(value: object) -> str:
    """`repr`, or the type alone where that has an address in it."""
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text
