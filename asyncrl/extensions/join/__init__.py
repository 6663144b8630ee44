"""Engines that join a run in progress, and leave it."""
