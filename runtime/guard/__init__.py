"""Staying alive, and ending well: heartbeats, hangs, signals."""
