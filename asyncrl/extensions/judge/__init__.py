"""Rewards of other models: task.reward=judge, rubric and remote (a reward model)."""
