"""Supervised training on answers that are given."""
