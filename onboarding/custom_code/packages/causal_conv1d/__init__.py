"""Stand-in for causal-conv1d: a depthwise convolution along the sequence."""

from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update

__version__ = "1.5.0"
__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]
