"""What can be known to be wrong with a run before any of its processes is started."""
