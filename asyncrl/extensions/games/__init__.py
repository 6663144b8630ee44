"""Games of textarena and environments of gymnasium as tasks: task.kind=textarena and task.kind=gymnasium."""
