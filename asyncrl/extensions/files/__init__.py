"""Transport of new weights as files of a shared file system: weights.transport=disk."""
