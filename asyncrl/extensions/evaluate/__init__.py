"""Evaluation of a model without training: every question once, with intervals, and comparison of two models."""
