"""Rewards that are made of other rewards."""
