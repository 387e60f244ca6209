"""Shows that training over ranks equals training in one process: ``python -m runtime.prove``."""
