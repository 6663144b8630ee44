"""Addresses, ports, certificates and keys of a run's servers."""
