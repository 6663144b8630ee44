"""The algorithm: pure functions of tensors, without Megatron, SGLang and HTTP.

Importing the package registers every estimator, loss and correction of the core; that imports no torch.
"""

from asyncrl.algo import advantage, correction, loss

__all__ = ["advantage", "correction", "loss"]
