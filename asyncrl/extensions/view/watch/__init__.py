"""The asyncrl-watch command, which serves a live page of runs from their files."""
