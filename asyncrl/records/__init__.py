"""Recordings of runs, for inspection, replay and resumption: docs/runs.md."""
