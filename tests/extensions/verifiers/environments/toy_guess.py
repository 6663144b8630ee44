"""Several turns with a user that the environment plays, and a second agent that is only asked, and not trained."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["GuessEnv", "GuessTaskset"]


class GuessConfig(vf.EnvConfig):
    """Two that guess, and one that watches."""

    left: vf.AgentConfig = vf.AgentConfig()
    right: vf.AgentConfig = vf.AgentConfig()
    watcher: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    """Each guesses up to three times and is told whether it was right; the watcher is asked once."""

    async def setup(self, agents: vf.Agents) -> None:
        """Train the players alone."""
        agents.watcher.trainable = False

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Play both, one after the other."""
        for player, wanted in ((agents.left, "1"), (agents.right, "2")):
            async with player.interaction(task) as game:
                segment = await game.turn()
                for _ in range(2):
                    if segment.terminated or (segment.last_reply or "").startswith(wanted):
                        break
                    segment = await game.turn("0")
            game.trace.record_reward("found", float((segment.last_reply or "").startswith(wanted)))
        await agents.watcher.run(task)


class GuessTaskset(vf.Taskset[vf.Task, vf.TasksetConfig]):
    """Ten numbers."""

    def load(self):
        """Yield the tasks."""
        for number in range(10):
            yield vf.Task(vf.TaskData(name=f"guess#{number}", prompt=f"{number:03}"), self.config.task)
