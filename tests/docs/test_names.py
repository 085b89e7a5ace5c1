"""The Python in docs/ is Python, and the names of percore that it uses exist."""

import ast
import inspect
import sys

import pytest

import percore
import percore.logging
import percore.testing
import percore.web
from tests.docs.blocks import name_of, pages, python_of

VERBS = ("map", "map_items", "starmap", "options", "aclose")


def parse(source: str) -> ast.AST:
    """A piece of a page may await, as at the prompt of `python -m asyncio`."""
    tree = compile(source, "<page>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    assert isinstance(tree, ast.AST)
    return tree


def test_the_names_that_a_page_shows_exist(subtests: pytest.Subtests) -> None:
    seen = 0
    for page in pages():
        for block, source in python_of(page):
            seen += 1
            with subtests.test(page=name_of(page), line=block.line):
                check(parse(source))
    assert seen > 10


def check(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "percore":
            assert node.attr in (*percore.__all__, "logging", "testing", "web")
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("percore.logging", "percore.testing", "percore.web"):
            assert node.attr in sys.modules[ast.unparse(node.value)].__all__
        if isinstance(node, ast.ImportFrom) and node.module == "percore":
            assert {name.name for name in node.names} <= set(percore.__all__)
        if isinstance(node, ast.Call) and (signature := signature_of(node.func)):
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            assert given <= set(signature.parameters), ast.unparse(node)


def signature_of(called: ast.expr) -> inspect.Signature | None:
    """Of percore's classes, of the runner's methods that take options, and of an executor's map."""
    if not isinstance(called, ast.Attribute):
        return None
    if ast.unparse(called) == "executor.map":
        return inspect.signature(percore.LoopPoolExecutor.map)
    if ast.unparse(called) in ("percore.Runner", "percore.LoopPoolExecutor", "percore.threaded"):
        return inspect.signature(getattr(percore, called.attr))
    if isinstance(called.value, ast.Name) and called.value.id == "runner" and called.attr in VERBS:
        return inspect.signature(getattr(percore.Runner, called.attr))
    return None
