"""What each test process needs, imported once: conftest.py forks them from a process that has imported this."""

import gc

import torch

from tests.cuda_stub import device  # isort: skip

device.install()  # before Megatron asks

import megatron.core.models.gpt  # noqa: E402
import transformers  # noqa: E402

gc.freeze()  # what is alive now is not looked at again

__all__ = ["device", "megatron", "torch", "transformers"]
