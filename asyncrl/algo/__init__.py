"""The algorithms, as pure functions of torch tensors on CPU or GPU: advantages, losses, packing. They use no process
groups, no Megatron and no HTTP."""
