"""Further fields of every request to an engine."""
