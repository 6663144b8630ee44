"""Prompts: the tasks' questions rendered with the model's chat template, as one training stream per task and the eval
sets.

Evaluation questions are drawn first; training skips every question whose rendered text is in any evaluation set, so the
two are disjoint even if the tasks' generators repeat themselves. If a question has a "seed", the seed is part of its
identity, because games may open with the same text.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cached_property, partial

import msgspec

from asyncrl import lookup
from asyncrl.config import Config
from asyncrl.errors import ConfigError
from asyncrl.images import READS_NONE, ImageReader, ImageRefused, images_in, without_images
from asyncrl.rollout.held_out import MAX_SKIPS, draw_held_out, overlong_questions, training_range
from asyncrl.schema import Identity, Prompt, Template
from asyncrl.tasks import Question, Task, ask

TEMPLATE_BYTES = 256
"""Upper bound of the bytes that a chat template adds around one message."""


class Cursor(msgspec.Struct, frozen=True):
    """Position in the streams of training prompts."""

    prompts: int  # of all tasks
    questions: dict[str, int]  # by task, including those that were left out


class Ahead:
    """Renders questions elsewhere before they are drawn. This one renders none."""

    most = 0
    """Number of questions of a task that are asked for ahead."""

    def ask(self, task: str, index: int) -> None:
        """Let a question be rendered that will be drawn later."""

    def take(self, task: str, index: int) -> list[int] | None:
        """Return the tokens of a question that is drawn now, or None if they have not come."""
        return None


class Prompts:
    """Endless training prompts by task, and the prompts of each evaluation set."""

    def __init__(
        self,
        config: Config,
        tasks: Mapping[str, Task],
        template: Template,
        model_length: int,
        tell: Callable[[str], None] = lambda text: None,
        images: ImageReader | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """`tell` receives a message about questions that are left out. `images` reads those of
        questions. `ahead` renders questions without images elsewhere."""
        self._images = images or ImageReader()
        self._ahead = Ahead() if self._images.ahead or ahead is None else ahead
        self._tasks = tasks
        self._template = template
        self._tell = tell
        self._refuses = config.rollout.overlong_prompts == "refuse"
        self.left_out: Counter[str] = Counter()  # overlong questions of endless tasks
        self._questions = config.eval.questions
        self._seed = config.run.seed
        self._field = config.field_of
        self._longest = model_length - config.rollout.max_new_tokens
        self._serial = 0
        self._drawn: Counter[str] = Counter()
        self._begun: dict[tuple[str, int], tuple[Question, list[Future[bytes]]]] = {}  # by task and index
        look = partial(overlong_questions, longest=self._longest, refuses=self._refuses, tell=tell)
        self._overlong = {
            name: look(name, tasks[name], partial(self._length, name)) for name in config.mixture | config.eval_sets
        }
        ranges = {
            name: training_range(name, tasks[name], self._overlong[name], self._questions) for name in config.mixture
        }
        serial = itertools.count()
        self.held_out = {
            name: draw_held_out(
                partial(self._render, "", name),
                name,
                tasks[name],
                self._questions,
                first=ranges[name][0] if name in ranges else None,
                longest=self._longest,
                serial=serial,
            )
            for name in config.eval_sets
        }
        taken = {one.identity for prompts in self.held_out.values() for one in prompts}
        self.training = {name: self._training(name, *ranges[name], taken) for name in config.mixture}
        self._mixture = random.Random(f"{config.run.seed} mixture")

    def draw(self, weights: Mapping[str, float]) -> Prompt:
        """Return the next prompt, of a task that is drawn with these weights; one that is not named has weight 0. Each
        prompt takes one number of the generator, so that prompt n is a function of the seed and of all weights so far.
        While these do not depend on how groups went, the sequence of prompts does not depend on when groups end."""
        names = list(self.training)
        (name,) = self._mixture.choices(names, [weights.get(name, 0.0) for name in names])
        return next(self.training[name])

    def cursor(self) -> Cursor:
        """Return the position from which the next prompts are drawn."""
        return Cursor(self._serial, dict(self._drawn))

    def figures(self) -> dict[str, float]:
        """Return the number of overlong questions under its name in metrics.jsonl, or nothing if there are none."""
        count = self.left_out.total() + sum(map(len, self._overlong.values()))
        return {"prompts/overlong": float(count)} if count else {}

    def go_on(self, cursor: Cursor) -> None:
        """Continue from the cursor. Call this before the first prompt is drawn."""
        self._serial = cursor.prompts
        self._drawn = Counter(cursor.questions)
        for _ in range(cursor.prompts):
            self._mixture.random()

    def again(self, uid: str, task: str, index: int) -> Prompt:
        """Render a training prompt that was drawn before. Raises ConfigError if that question no longer exists or has
        become too long."""
        size = self._tasks[task].size if task in self._tasks else 0
        if size is not None and index >= size:
            remedy = (
                f"The checkpoint has an unfinished group on question {index} of task {task}. Resume with the "
                "same tasks."
            )
            raise ConfigError("resume", task, remedy)
        if (rendered := self._render(uid, task, index)) is None:
            what = f"The checkpoint has an unfinished group on question {index} of task {task}, which is too long now."
            remedy = f"{what} Resume with the original settings."
            raise ConfigError("rollout.max_new_tokens", self._longest, remedy)
        return rendered

    def _training(self, name: str, first: int, last: int, held_out: set[Identity]) -> Iterator[Prompt]:
        """Yield questions in an order that depends on the seed alone, not on the other tasks; a finite task is
        reshuffled every epoch. Uids count the prompts of all tasks."""
        skipped, texts = 0, {ids for ids, _, _ in held_out}
        indices = itertools.islice(self._indices(name, first, last), self._drawn[name], None)
        for index in self._looking_ahead(name, indices):
            self._drawn[name] += 1
            uid = f"p{self._serial:08d}"
            prompt = self._rendered_ahead(uid, name, index, texts) or self._render(uid, name, index)
            if prompt is None or prompt.identity in held_out:
                skipped += 1
                if skipped == MAX_SKIPS:
                    raise ConfigError(
                        "eval.questions",
                        self._questions,
                        f"{MAX_SKIPS} training questions of {name} in a row are evaluation questions, or longer than "
                        f"the {self._longest} tokens that rollout.max_new_tokens leaves: lower one, or add questions.",
                    )
                continue
            skipped = 0
            self._serial += 1
            yield prompt

    def _looking_ahead(self, name: str, indices: Iterator[int]) -> Iterator[int]:
        """Yield the indices, while the images of the next ones are being decoded, or the next ones rendered
        elsewhere."""
        following: deque[int] = deque()
        most = self._images.ahead or self._ahead.most
        for index in indices:
            following.append(index)
            self._ahead.ask(name, index)
            if self._images.ahead and index not in self._overlong[name]:
                self._begun[name, index] = self._begin(name, index)
            if len(following) > most:
                yield following.popleft()

    def _indices(self, name: str, first: int, last: int) -> Iterator[int]:
        order = random.Random(f"{self._seed} {name}")
        if self._tasks[name].size is None:
            while True:
                yield order.randrange(first, last)
        while True:
            epoch = list(range(first, last))
            order.shuffle(epoch)
            yield from epoch

    @cached_property
    def _around(self) -> int:
        """Number of tokens that the template puts around an empty message."""
        return len(self._template.begin([{"role": "user", "content": ""}], ()))

    def _length(self, name: str, index: int) -> int:
        """Return how many tokens a question has. It is not rendered if it is without tools and an upper limit fits,
        which is then returned: every token has at least one byte. A question whose image is refused has 0: it is left
        out when it is drawn."""
        question = question_of(self._tasks[name], self._template, index, self._field(name))
        messages = without_images(question["messages"])
        most = self._around + len(msgspec.json.encode(messages)) + TEMPLATE_BYTES * len(messages)
        most += self._images.most_tokens * len(images_in(question["messages"]))
        if most <= self._longest and not question.get("tools"):
            return most
        try:
            return self._read(question, self._decoding(question))[2]
        except ImageRefused:
            return 0

    def _rendered_ahead(self, uid: str, name: str, index: int, held_out: Collection[tuple[int, ...]]) -> Prompt | None:
        """Return a prompt that was rendered elsewhere, without its question, which the process that plays it makes
        anew. Returns None if it has not come, or might have to be left out, which its question decides."""
        ids = self._ahead.take(name, index)
        if ids is None or len(ids) > self._longest or tuple(ids) in held_out:
            return None
        return Prompt(uid, ids, {}, name, index)

    def _render(self, uid: str, name: str, index: int) -> Prompt | None:
        """Render a question, or return None if it is too long or an image of it is refused, and may be left out."""
        if index in self._overlong[name]:
            return None
        key = name, index
        question, pending = self._begun.pop(key) if key in self._begun else self._begin(name, index)
        try:
            ids, images, length = self._read(question, pending)
            if length <= self._longest:
                return Prompt(uid, ids, question, name, index, images)
            text = f"has {length} tokens, but rollout.max_new_tokens leaves only {self._longest} for a prompt"
        except ImageRefused as refused:
            text = f"cannot be read: {refused}"
        text = f"Question {index} of {name} {text}"
        if self._refuses:
            raise ConfigError("rollout.overlong_prompts", "refuse", f"{text}.")
        if not self.left_out[name]:
            self._tell(f"{text}: it is skipped, like all others that are too long (rollout.overlong_prompts)")
        self.left_out[name] += 1
        return None

    def _begin(self, name: str, index: int) -> tuple[Question, list[Future[bytes]]]:
        """Return a question and the futures of its images."""
        question = question_of(self._tasks[name], self._template, index, self._field(name))
        return question, self._decoding(question)

    def _decoding(self, question: Question) -> list[Future[bytes]]:
        """Begin to decode the images of a question."""
        with suppress(ImageRefused):  # of a part that is no image: _read says so
            return [self._images.begin(one) for one in images_in(question["messages"])]
        return []

    def _read(self, question: Question, pending: Sequence[Future[bytes]]) -> tuple[list[int], list[bytes], int]:
        """Return the tokens and images of a question, and how many tokens the model reads. Raises ImageRefused."""
        ids = self._template.begin(question["messages"], question.get("tools", ()))
        images = [one.result() for one in pending]
        return ids, images, len(ids) + self._images.added(ids, images)


def question_of(task: Task, template: Template, index: int, field: str) -> Question:
    """Return question `index` of the task that this setting configures, as a model with this chat template is shown
    it."""
    question = ask(task, index, field)
    for function in lookup.loaded("question"):
        question = function(question, template)
    return question


def render(template: Template, question: Question) -> list[int]:
    """Return the tokens of a question for a model that reads text. Raises ImageRefused if it has an image."""
    if images_in(question["messages"]):
        raise ImageRefused(READS_NONE)
    return template.begin(question["messages"], question.get("tools", ()))
