"""Loads a candidate's source file as a fresh module. Run only where its code may run: in the sandbox, or verified."""

from __future__ import annotations

import hashlib
import itertools
import linecache
import sys
from pathlib import Path
from types import ModuleType

_count = itertools.count()


def load_module(path: Path) -> ModuleType:
    """Execute the file at ``path`` as a new module, independent of every earlier load of it.

    The source stays on disk because Triton reads it from there; no bytecode is written, and none that may be stale
    is read. Where kernels are interpreted, call ``interpreter.activate()`` before.

    Raises:
        OSError: the file cannot be read.
        SyntaxError: it is not Python; anything else that the module itself raises.
    """
    path = path.resolve()
    name = f"_candidate_{next(_count)}_{path.stem}"
    code = compile(path.read_text(), str(path), "exec")
    linecache.checkcache(str(path))
    module = ModuleType(name)
    module.__file__ = str(path)
    # decorators look their module up by name
    sys.modules[name] = module
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_source(source: str, folder: Path) -> ModuleType:
    """Write ``source`` to ``folder`` under the name of its digest and load it."""
    path = folder / f"kernel_{hashlib.sha256(source.encode()).hexdigest()[:16]}.py"
    path.write_text(source)
    return load_module(path)
