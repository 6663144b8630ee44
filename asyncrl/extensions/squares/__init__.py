"""A task and a game with images, which tiny models learn from random weights."""
