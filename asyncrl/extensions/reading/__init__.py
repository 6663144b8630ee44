"""Reading of recordings and timelines."""
