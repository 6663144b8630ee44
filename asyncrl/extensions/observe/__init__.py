"""Traces of prompts through all processes, and metrics for Prometheus."""
