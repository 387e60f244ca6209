"""Which field a failure is about, for the user who has to correct it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from onboarding.problem import Problem
from onboarding.stages.intake.contradictions import contradictions
from onboarding.stages.parse.faults import Fault, choices_of, each_config, faults_of, names_in, path_to

LONGEST = 80


def blame(error: Exception, cause: BaseException, root: Any, stated: dict[str, Any]) -> None:
    """Add ``field`` to a problem, and to its detail what is wrong with it; nothing where no field can be told.

    In this order: a choice that there is not, fields that contradict each other, a field that is not set, one that the
    message names, one whose number it quotes, and what the failing expression itself reads.

    Args:
        error: the problem; anything else stays as it is.
        cause: the exception behind it.
        root: the configuration object, as far as it was built.
        stated: the definition's own fields.
    """
    if not isinstance(error, Problem) or "field" in error.extra:
        return
    told = (
        *_unknown_choice(root, cause),
        *_unknown_part(stated, cause),
        *_contradicting(stated),
        *_named_stated(stated, cause),
        *_read(root, cause),
    )
    for path, what in told:
        error.extra["field"] = path
        error.detail = f"{error.detail} [{path} {what}]"
        return


def _unknown_choice(root: Any, cause: BaseException) -> Iterator[tuple[str, str]]:
    """The text field whose value a table does not have."""
    key = cause.args[0] if isinstance(cause, KeyError) and cause.args else None
    if not isinstance(key, str) or root is None:
        return
    choices = choices_of(cause)
    among = f", which is none of {', '.join(sorted(choices))}" if choices else ""
    for owner, path in each_config(root):
        for name, value in vars(owner).items():
            inner = value if isinstance(value, dict) else {}
            for last in [(name,)] if value == key else [(name, k) for k, v in inner.items() if v == key]:
                yield ".".join((*path, *last)), f"is {key!r}{among}"


def _unknown_part(stated: dict[str, Any], cause: BaseException) -> Iterator[tuple[str, str]]:
    """The list, or the text of one letter a layer, that holds the key which a table does not have."""
    key = cause.args[0] if isinstance(cause, KeyError) and cause.args else None
    if not isinstance(key, str):
        return
    choices = choices_of(cause)
    among = f", which is none of {', '.join(sorted(choices))}" if choices else ""
    for path, value in _stated_values(stated):
        name = path.rpartition(".")[2]
        spelled = isinstance(value, str) and len(key) == 1 and key in value and _SPELLED.search(name)
        if spelled or (isinstance(value, list) and key in value):
            yield path, f"holds {key!r}{among}"


_SPELLED = re.compile(r"pattern|types?$|layers?$")
"""Fields that spell a stack letter by letter."""


def _stated_values(stated: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in stated.items():
        yield f"{path}{name}", value
        if isinstance(value, dict):
            yield from _stated_values(value, f"{path}{name}.")


def _contradicting(stated: dict[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Of what the user wrote, nested configurations behind the outer one."""
    for found in contradictions(stated):
        yield f"{path}{found.field}", f"does not fit: {found.why}"
    for name, value in stated.items():
        if isinstance(value, dict):
            yield from _contradicting(value, f"{path}{name}.")


def _named_stated(stated: dict[str, Any], cause: BaseException) -> Iterator[tuple[str, str]]:
    """Fields that the message names, as the user wrote them: of a configuration that was not even built."""
    for name in names_in(cause):
        for path, fields in [("", stated), *((f"{k}.", v) for k, v in stated.items() if isinstance(v, dict))]:
            if name in fields:
                yield f"{path}{name}", f"is {_short(fields[name])}"


def _read(root: Any, cause: BaseException) -> Iterator[tuple[str, str]]:
    faults = faults_of(cause)
    unset = [fault for fault in faults if fault.unset]
    # what the calls around the failing one were given was read without a fault
    innermost = [fault for fault in faults if not fault.unset and fault.depth == 0]
    for fault in (*unset, *_named(root, cause), *_by_number(root, cause), *innermost):
        path = ".".join((*(path_to(root, fault.config) or ()), fault.name))
        state = "is not set" if fault.unset else f"is {_short(fault.value)}"
        yield path, f"{state}, read at {fault.where}"


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."


def _named(root: Any, error: BaseException) -> list[Fault]:
    """Fields that the message names, if a configuration has them."""
    return [
        Fault(config=owner, name=name, value=vars(owner)[name], where="the message")
        for name in names_in(error)
        for owner, _ in (each_config(root) if root is not None else ())
        if name in vars(owner)
    ]


def _by_number(root: Any, error: BaseException) -> list[Fault]:
    """Fields whose value the message quotes, those whose name it quotes too first."""
    text = str(error)
    numbers = {int(n) for n in re.findall(r"\d+", text) if int(n) > 1}
    words = set(re.findall(r"[a-z]+", text.lower()))
    found = []
    for owner, _ in each_config(root) if root is not None else ():
        for name, value in vars(owner).items():
            if isinstance(value, int) and not isinstance(value, bool) and value in numbers:
                common = len(words & set(name.split("_")) - {"num", "size"})
                found.append((common, Fault(config=owner, name=name, value=value, where="the message")))
    # a number that one field alone holds points at it
    shared = Counter(fault.value for _, fault in found)
    found.sort(key=lambda pair: (shared[pair[1].value], -pair[0]))
    return [fault for common, fault in found if common]
