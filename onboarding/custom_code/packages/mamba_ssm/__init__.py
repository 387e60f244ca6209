"""Stand-in for mamba-ssm: its scans and gated norm."""

__version__ = "2.3.0"
