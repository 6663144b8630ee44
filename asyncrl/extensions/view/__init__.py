"""Views of runs, from the files that they write: asyncrl-inspect and asyncrl-watch."""
