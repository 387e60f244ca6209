"""Routed experts over ranks: selection, dispatch, balance."""
