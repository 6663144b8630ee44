"""Execution of a run as a Slurm job: its script, machines and processes as steps, without Ray or agents on the
machines."""
