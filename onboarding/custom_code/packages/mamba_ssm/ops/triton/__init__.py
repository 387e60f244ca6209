"""Triton operators of mamba-ssm."""
