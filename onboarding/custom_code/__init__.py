"""Model definitions that bring their own Python code: read with ``ast`` by intake, executed in the sandbox only.

``definition.py`` says what a job's definition is, ``confined.py`` runs a function on it (in the sandbox when it has
code), ``load.py`` imports the code there and tells transformers of its classes, ``packages/`` holds stand-ins for
optional packages that such code imports and this machine lacks.
"""
