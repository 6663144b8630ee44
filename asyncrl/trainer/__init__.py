"""The trainer ranks: the Megatron model, the training loop, and the source of batches."""
