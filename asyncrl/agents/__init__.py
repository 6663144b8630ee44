"""Agents that ship with asyncrl, each in a small file. The config field `agent` also takes any other import path."""
