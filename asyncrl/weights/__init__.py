"""Weight transfer from trainer to engines: HF names <-> Megatron shards, buckets, transports, publishing."""
