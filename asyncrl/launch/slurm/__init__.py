"""A run as a Slurm job: its script, its machines, and its processes as steps. No Ray, and no agent on the machines."""
