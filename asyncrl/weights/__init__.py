"""Weights on their way: HF names <-> Megatron shards, buckets, transports, publishing."""
