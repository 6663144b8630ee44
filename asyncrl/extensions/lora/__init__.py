"""Adapters on a frozen base (LoRA), trained in place of all weights."""
