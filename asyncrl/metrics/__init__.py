"""Figures: spans and step records, their sinks, and the console that shows them."""
