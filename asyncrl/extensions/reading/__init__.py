"""Reading of recordings."""
