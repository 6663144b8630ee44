"""Weights of tasks that depend on how the tasks went."""
