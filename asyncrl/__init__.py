"""asyncrl: reinforcement learning of language models while they generate. The tour is in README.md."""

__version__ = "0.1.0"
