"""Source code as HTML with classes only (no inline style), and the template that a candidate came from."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from markupsafe import Markup
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer


@lru_cache(maxsize=32)
def python_html(source: str) -> Markup:
    """Highlighted Python; Pygments escapes everything that it does not make itself."""
    return Markup(highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True)))


def template_source(reference: str) -> str | None:
    """The template that a candidate names (path and sha256), if this checkout still has exactly that file."""
    match = re.search(r"kernel_templates/([a-z0-9_]+)/template\.py", reference)
    digest = re.search(r"\b[0-9a-f]{64}\b", reference)
    # find_spec locates the package without importing it, which would load torch.
    spec = find_spec("kernel_templates")
    if match is None or digest is None or spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / match.group(1) / "template.py"
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest.group():
        return None
    return path.read_text()
