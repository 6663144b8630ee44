"""Engines and trainers that use the same GPUs in turns: cluster.placement=colocated."""
