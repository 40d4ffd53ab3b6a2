"""How the models of Hugging Face transformers spell the canonical names."""

from kamui_transformers.recognition import recognise

__all__ = ["recognise"]
