"""The algorithm: pure functions of tensors, without Megatron, SGLang and HTTP.

Importing the package registers every estimator, loss and correction; that imports no torch.
"""

from asyncrl.algo import advantage, correction, credit, loss

__all__ = ["advantage", "correction", "credit", "loss"]
