"""Low-rank adapters on linear layers and on grouped experts."""

from runtime.lora.config import LoraConfig

__all__ = ["LoraConfig"]
