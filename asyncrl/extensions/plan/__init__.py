"""Predictions: how to divide GPUs before a run (asyncrl-plan, plan.apply), what to change in it (plan.elastic)."""
