"""Environments that ship with asyncrl: one small file each; `task.kind` takes any import path."""
