"""Where code that a model wrote runs: protocol.py is the seam, local.py the backend of this machine."""
