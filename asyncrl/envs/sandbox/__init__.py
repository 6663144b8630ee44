"""Where code that nobody has read is run."""
