"""Checks of a run before it starts, by subject; `run` has their order. Rules between settings: config/rules.py."""
