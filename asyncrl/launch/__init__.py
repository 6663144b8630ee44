"""The launcher: compose, validate, plan, supervise. Never imports torch."""
