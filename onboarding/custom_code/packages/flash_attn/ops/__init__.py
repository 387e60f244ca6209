"""Operators of flash-attn that modeling code imports."""
