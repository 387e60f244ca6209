"""A decoder as a plain torch module."""
