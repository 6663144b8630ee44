"""Transport of new weights in which only changed values travel, through files: weights.transport=delta."""
