"""Metrics: spans and step records, their sinks, and the console that displays them."""
