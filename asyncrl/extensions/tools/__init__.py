"""Tools that a model can call (functions, programs in a sandbox, MCP servers), and the environment that runs them."""
