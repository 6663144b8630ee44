"""Agents that ship with asyncrl, one small file each. The config field `agent` takes any import path."""
