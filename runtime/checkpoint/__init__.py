"""Saving a run so that it can be gone on with: atomic, verified, by any number of ranks."""
