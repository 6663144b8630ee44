"""Checkpoint folders: which are complete, which is the newest, which may be removed. Used by all processes of a run."""
