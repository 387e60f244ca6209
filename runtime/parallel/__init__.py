"""Spreading a model over ranks; ``runtime/README.md`` shows the whole step."""
