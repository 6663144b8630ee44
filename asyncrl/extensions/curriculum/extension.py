"""What this folder adds: the setting curriculum.function."""

from __future__ import annotations

from asyncrl import extension
from asyncrl.settings import Section


class CurriculumSettings(Section):
    """The mixture of several tasks (asyncrl/extensions/curriculum/README.md)."""

    function: str | None = None
    """Import path, module:function of (progress) -> task weights by name, for the next prompt; a task that is left out
    has weight 0. progress: asyncrl.extensions.curriculum.progress.CurriculumInput
    (asyncrl.extensions.curriculum.progress:towards_half_solved prefers tasks that are solved about half of the time).
    unset: the weights of the tasks' sections."""


class CurriculumExtension(extension.Extension):
    """Curricula."""

    Settings = CurriculumSettings

    def rollout(self) -> extension.RolloutHooks:
        """Return the hooks in the rollout process."""
        if self.settings.function is None:
            return extension.RolloutHooks()
        from asyncrl.extensions.curriculum.progress import CurriculumMixture

        return CurriculumMixture(self.settings.function)


Own = CurriculumExtension
