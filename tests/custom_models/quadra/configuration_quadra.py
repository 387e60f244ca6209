"""Configuration of Quadra: Llama's."""

from transformers.models.llama.configuration_llama import LlamaConfig


class QuadraConfig(LlamaConfig):
    model_type = "quadra"
