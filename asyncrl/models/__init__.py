"""Model families, and the built-in models, which need no hub and are written once as HF folders.

families       one record for each class of transformers that can be trained; family.py says what is in it
parts          what families have in common
architectures  an HF config in Megatron's terms, and what of it is refused
catalog        names -> folders in the cache; it never imports torch
tiny           random weights: the 0.13M-parameter model of tests and CI, and small models of every family
"""
