"""Questions of public datasets and benchmarks."""
