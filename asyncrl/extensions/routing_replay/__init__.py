"""Routing replay: routers of mixtures of experts use experts that were chosen before (routing_replay.kind)."""
