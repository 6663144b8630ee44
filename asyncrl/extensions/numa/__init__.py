"""Processes with GPUs on the CPUs near them."""
