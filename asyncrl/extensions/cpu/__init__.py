"""CPU stand-ins for CUDA kernels and CUDA-only imports. Where CUDA is available, none of them is used."""
