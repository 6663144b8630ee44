"""Unit tests of code that a model writes, in a sandbox: task.reward=code."""
