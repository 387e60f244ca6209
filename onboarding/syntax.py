"""Python source to a syntax tree, safely from many threads. Free of torch."""

from __future__ import annotations

import ast
import threading

_ONE_AT_A_TIME = threading.Lock()


def parse(source: str | bytes, filename: str = "<unknown>") -> ast.Module:
    """``ast.parse``, one call at a time.

    CPython 3.11 counts the depth of a tree in the interpreter, not in the call: two threads that parse at one moment
    can end in ``SystemError: AST constructor recursion depth mismatch``.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as ``ast.parse``.
    """
    with _ONE_AT_A_TIME:
        return ast.parse(source, filename=filename)
