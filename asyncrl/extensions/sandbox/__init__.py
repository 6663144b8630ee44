"""Sandboxes that run code written by a model: protocol.py is the interface, local.py the backend on this machine."""
