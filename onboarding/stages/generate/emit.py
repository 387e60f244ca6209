"""Writes a specialised function as source: untouched statements are copied with their comments, the rest unparsed."""

from __future__ import annotations

import ast
import copy
import io
import tokenize

FORMAT_PRAGMAS = ("# fmt:", "#fmt:")


class Source:
    """A template's text, and the comments in it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines()
        self.trailing: dict[int, str] = {}
        """Comments behind code, by line number."""
        self.own_line: dict[int, str] = {}
        """Comments on lines of their own."""
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                alone = not token.line[: token.start[1]].strip()
                (self.own_line if alone else self.trailing)[token.start[0]] = token.string

    def lead(self, first_line: int, after_line: int) -> list[str]:
        """Comments (without their indent) and blank lines directly above a line, down to ``after_line``."""
        found: list[str] = []
        for number in range(first_line - 1, after_line, -1):
            if number in self.own_line:
                found.insert(0, self.own_line[number])
            elif not self.lines[number - 1].strip():
                found.insert(0, "")
            else:
                break
        return found

    def mark(self, function: ast.FunctionDef) -> None:
        """Note on every statement its leading comments and what it looked like."""

        def mark_block(statements: list[ast.stmt], start: int) -> None:
            previous = start
            for statement in statements:
                statement.source = self  # type: ignore[attr-defined]
                statement.lead = self.lead(statement.lineno, previous)  # type: ignore[attr-defined]
                statement.before = ast.dump(statement)  # type: ignore[attr-defined]
                for field in ("body", "orelse", "finalbody"):
                    inner = getattr(statement, field, None)
                    if isinstance(inner, list) and inner and isinstance(inner[0], ast.stmt):
                        mark_block(inner, statement.lineno)
                previous = statement.end_lineno or statement.lineno

        mark_block(function.body, function.lineno)


def emit_function(function: ast.FunctionDef, source: Source, signature_changed: bool) -> list[str]:
    """The lines of a module-level function."""
    lines: list[str] = []
    for decorator in function.decorator_list:
        lines.append(f"@{ast.unparse(decorator)}")
    if signature_changed:
        lines += _header(function)
    else:
        lines += source.lines[function.lineno - 1 : _body_start(function, source) - 1]
    return lines + emit_block(function.body, 4)


def _body_start(function: ast.FunctionDef, source: Source) -> int:
    """Line on which the signature has ended."""
    first = function.original_first_line  # type: ignore[attr-defined]
    return int(first) - len(source.lead(int(first), function.lineno))


def emit_block(statements: list[ast.stmt], indent: int) -> list[str]:
    """The lines of a block."""
    lines: list[str] = []
    for i, statement in enumerate(statements):
        lead = list(getattr(statement, "lead", []))
        while i == 0 and lead and not lead[0]:
            lead.pop(0)
        lines += [" " * indent + text if text else "" for text in lead]
        lines += emit_statement(statement, indent)
    return lines


def emit_statement(statement: ast.stmt, indent: int) -> list[str]:
    """The lines of one statement without its leading comments."""
    source: Source | None = getattr(statement, "source", None)
    if source is not None and ast.dump(statement) == getattr(statement, "before", None):
        copied = _copied(statement, source, indent)
        if copied is not None:
            return copied
    pad = " " * indent
    if isinstance(statement, (ast.If, ast.For, ast.While, ast.With)):
        lines = [pad + text for text in _header(statement)]
        if source is not None:
            lines[-1] += _comment(source, statement.lineno)
        lines += emit_block(statement.body, indent + 4)
        orelse = getattr(statement, "orelse", [])
        if len(orelse) == 1 and isinstance(statement, ast.If) and isinstance(orelse[0], ast.If):
            inner = emit_statement(orelse[0], indent)
            if getattr(orelse[0], "lead", []):
                return [*lines, pad + "else:", *emit_block(orelse, indent + 4)]
            inner[0] = f"{pad}el{inner[0].lstrip()}"
            return lines + inner
        if orelse:
            lines += [pad + "else:", *emit_block(orelse, indent + 4)]
        return lines
    lines = [pad + text for text in _unparse(statement).split("\n")]
    if source is not None:
        last = statement.end_lineno or statement.lineno
        lines[-1] += _comment(source, last)
        # comments between the arguments of a call move above it
        inside = [source.own_line[n] for n in range(statement.lineno, last + 1) if n in source.own_line]
        inside += [source.trailing[n] for n in range(statement.lineno, last) if n in source.trailing]
        lines = [pad + text for text in inside if not text.startswith(FORMAT_PRAGMAS)] + lines
    return lines


def _unparse(statement: ast.stmt) -> str:
    """``ast.unparse``, but a launch over one axis keeps the parentheses of its grid: ``kernel[(n,)](...)``."""
    statement = copy.deepcopy(statement)
    for node in ast.walk(statement):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) == 1:
            # unparse writes a name as it is
            node.slice = ast.Name(id=f"({ast.unparse(node.slice.elts[0])},)", ctx=ast.Load())
    return ast.unparse(statement)


def _copied(statement: ast.stmt, source: Source, indent: int) -> list[str] | None:
    """The statement's own lines at the new indent; None if moving them would change a string."""
    lines = source.lines[statement.lineno - 1 : statement.end_lineno]
    old = len(lines[0]) - len(lines[0].lstrip())
    # the branches before it may be gone
    lines[0] = lines[0].replace("elif ", "if ", 1) if lines[0].lstrip().startswith("elif ") else lines[0]
    if old == indent:
        return lines
    strings = (n for n in ast.walk(statement) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    if any((n.end_lineno or n.lineno) > n.lineno for n in strings):
        return None
    return [" " * indent + line[old:] if line.strip() else "" for line in lines]


def _header(node: ast.stmt) -> list[str]:
    """Everything of a compound statement up to its colon."""
    bare = copy.copy(node)
    bare.body = [ast.Pass()]  # type: ignore[attr-defined]
    if hasattr(bare, "orelse"):
        bare.orelse = []
    if isinstance(bare, ast.FunctionDef):
        bare.decorator_list = []
    return ast.unparse(ast.fix_missing_locations(bare)).split("\n")[:-1]


def _comment(source: Source, line: int) -> str:
    text = source.trailing.get(line, "")
    return f"  {text}" if text and not text.startswith(FORMAT_PRAGMAS) else ""
