"""Games of textarena and environments of gymnasium as tasks: task.kind=textarena and task.kind=gymnasium. A game of our
own for tiny models: task=higher_lower."""
