"""The fleet of SGLang engines: starting them, sending them requests, and updating their weights over HTTP."""
