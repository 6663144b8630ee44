"""Trains the batches of a recorded run again, repeats its schedule, and compares a run with it."""
