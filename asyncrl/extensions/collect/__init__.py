"""Engines alone, whose output is recorded: mode=rollout_only."""
