"""Preflight: checks of a run before any of its processes is started."""
