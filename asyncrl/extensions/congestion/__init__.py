"""How many groups run at once, by the loads of engines, trainer and machine."""
