"""Mathematical equality of an answer and its reference."""
