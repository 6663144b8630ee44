"""mode=rollout_only: what stands in the trainers' place when nothing is trained."""
