"""Engines with pipeline stages or replicas of attention."""
