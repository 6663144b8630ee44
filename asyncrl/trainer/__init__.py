"""The trainer ranks: Megatron, the loop, and the feed of batches."""
