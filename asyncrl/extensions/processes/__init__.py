"""Episodes in processes of their own, beside the rollout process that has the buffer."""
