"""mode=rollout_only: the process that replaces the trainers when nothing is trained."""
