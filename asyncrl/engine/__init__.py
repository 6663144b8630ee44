"""The SGLang fleet, driven through its command line and its HTTP API."""
