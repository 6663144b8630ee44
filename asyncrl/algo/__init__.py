"""Pure torch on CPU or GPU tensors: advantages, losses, packing. No distributed, no Megatron, no HTTP."""
