"""Rollout process: prompts -> agents -> router -> groups -> buffer, and the service that hands out batches."""
