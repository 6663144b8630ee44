"""Advantages of turns: turn_discounted and turn_loo."""
