"""The SGLang fleet, seen through its command line and its HTTP."""
