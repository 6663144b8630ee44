"""Settings from a file of one's own, and the schema with which an editor completes it. README.md has the details."""
