"""Operators of mamba-ssm."""
