"""Rollout process: prompts -> agents -> router -> groups -> buffer, and the server that hands out batches."""
