"""Modules of fla."""

from fla.modules.convolution import ShortConvolution
from fla.modules.fused_norm_gate import FusedRMSNormGated, FusedRMSNormSwishGate
from fla.modules.layernorm import RMSNorm

__all__ = ["FusedRMSNormGated", "FusedRMSNormSwishGate", "RMSNorm", "ShortConvolution"]
