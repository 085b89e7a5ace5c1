"""One module a row, each with a docstring and `row(*, quick: bool) -> Row`."""
