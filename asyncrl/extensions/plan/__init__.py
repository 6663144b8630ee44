"""Predictions: how to divide GPUs before a run (asyncrl-plan, cluster.plan), what to change in it (cluster.elastic)."""
