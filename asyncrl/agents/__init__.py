"""Agents that ship with asyncrl: one small file each; `rollout.agent` takes any import path."""
