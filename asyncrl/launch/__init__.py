"""The launcher: composes, validates, plans and supervises a run. It never imports torch."""
