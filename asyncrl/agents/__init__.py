"""Agents that ship with asyncrl: one small file each; `agent` takes any import path."""
