"""Folders of checkpoints: which are whole, which is the newest, which may go. Open to all processes of a run."""
