"""Advantage estimators and losses of single papers."""
