"""What stands in on a CPU for CUDA kernels and CUDA-only imports. Where CUDA is available, none of it is used."""
