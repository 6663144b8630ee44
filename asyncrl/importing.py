"""First import of a process that imports much: disables garbage collection until `done` is called.

While modules are imported, Python's garbage collector repeatedly scans objects of which hardly any is garbage. That
takes a quarter of the import time of SGLang, Megatron and transformers.
"""

import gc

gc.disable()


def done() -> None:
    """Enable garbage collection again. Existing objects are frozen: they are not scanned again, and forked children
    share them."""
    gc.freeze()
    gc.enable()
