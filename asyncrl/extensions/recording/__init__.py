"""Recordings of runs: the events, their files, and a reader of them."""
