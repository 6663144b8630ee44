"""Import this module first in a process that imports much. It disables garbage collection until `done` is called.

During imports, Python's garbage collector repeatedly scans objects of which hardly any is garbage. That takes a quarter
of the import time of SGLang, Megatron and transformers.
"""

import gc

gc.disable()


def done() -> None:
    """Enable garbage collection again, and freeze the existing objects.

    The collector does not scan frozen objects, so forked children go on sharing their memory.
    """
    gc.freeze()
    gc.enable()
