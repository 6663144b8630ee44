"""Capacity planner: estimates of duration, memory and throughput, and a simulation of a run in virtual time."""
