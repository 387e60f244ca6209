"""Triton operators of flash-attn that modeling code imports."""
