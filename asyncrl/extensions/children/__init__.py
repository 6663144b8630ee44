"""Child processes of an event loop."""
