"""Advantages of turns: grpo_turn, turn_discounted and turn_loo."""
