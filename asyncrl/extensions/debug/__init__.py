"""Repeats the schedule of a recorded run, and compares a run with a recorded one."""
