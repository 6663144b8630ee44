"""Timelines of a run: their files, and a reader of them."""
