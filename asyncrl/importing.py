"""The first import of a process that imports much; `done` when it has.

While modules are imported, Python's garbage collector looks again and again through objects of which hardly one is
garbage: a quarter of the time that SGLang, Megatron and transformers take. So it rests until then.
"""

import gc

gc.disable()


def done() -> None:
    """Collect again; what is there by now stays, is looked through no more, and is shared with forked children."""
    gc.freeze()
    gc.enable()
