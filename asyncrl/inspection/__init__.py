"""asyncrl-inspect: a recorded run, looked at."""
