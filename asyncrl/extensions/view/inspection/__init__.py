"""The asyncrl-inspect command, which shows a recorded run."""
