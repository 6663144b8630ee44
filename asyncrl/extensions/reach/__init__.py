"""Checks of the network between the machines of a job, and of the folders that they must share."""
