"""Stand-in for flash-linear-attention: the operators and modules that modeling code imports most."""

__version__ = "0.4.0"
