"""Asynchronous RL for LLMs: Megatron trains while SGLang generates, with bounded staleness (README.md)."""

__version__ = "0.1.0"
