"""The rows, by subject. A row is a function with `@row`: its docstring says what it measures and why, its body who takes part.

To add a row, add a function; nothing else lists them.
"""
