"""Helpers of fla's layers."""
