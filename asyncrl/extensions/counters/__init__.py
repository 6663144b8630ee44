"""Counters of engines, and what the GPUs do."""
