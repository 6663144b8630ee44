"""Documentation of the fields of every metrics file that a run writes. Scripts may rely on them; a test compares them
with the files.

Times are in seconds, log-probability gaps in nats. `step` counts batches and equals `version`, the version that the
step published.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# metrics.jsonl: one object per batch
STEP = {
    "step": "number of the batch, from 1",
    "version": "version that this step published",
    "reward/mean": "mean reward of the trained batch's trajectories",
    "reward/std": "their standard deviation",
    "groups/signal": "share of groups whose rewards differ",
    "groups/trained": "groups that went through the model",
    "groups/replayed": "groups of earlier batches that were trained again, beside those of the batch",
    "groups/running": "groups in flight when the batch was taken",
    "groups/ready": "groups waiting for their batch when it was taken",
    "groups/rejected": "groups rejected so far",
    "groups/requeued": "slots played anew so far",
    "completion/length": "mean tokens of a completion",
    "completion/truncated": "share of completions that ended by length",
    "episodes/turns": "mean turns of an episode",
    "episodes/cuts": "how often, on the mean, a role's context did not go on from its tokens before: an edit or a "
    "template cut the episode into samples there; forks apart",
    "staleness/mean": "mean over trajectories of version trained minus oldest version that wrote a token",
    "staleness/max": "its maximum; never above rollout.max_staleness",
    "staleness/mixed": "share of trajectories that more than one version wrote",
    "loss": "the step's loss",
    "grad_norm": "global gradient norm before clipping; 0 when no group had a signal",
    "lr": "learning rate of the step",
    "logprob_gap/mean": "mean |log-probability of the trainer minus that of the engine| of the trained tokens",
    "logprob_gap/max": "its maximum",
    "logprob_gap/p99": "its 99th percentile",
    "logprob_gap/kl": "k3 estimate of KL(engine || trainer)",
    "correction/capped": "share of tokens whose importance weight was cut at algo.correction.cap",
    "correction/ess": "effective sample size of the importance weights, as a share of the tokens",
    "correction/masked": "share of tokens that a correction, a selection or algo.shaping.mask_truncated took out",
    "loss/clipped": "share of tokens whose ratio has left the clip in the direction that their advantage wants",
    "steps/optimizer": "optimizer steps that were applied",
    "tokens/generated": "tokens that engines wrote for training since the step before, as the client counted them",
    "tokens/evaluation": "the same for evaluation",
    "tokens/running": "of groups in flight when the batch was taken (this and the next three: the ledger's)",
    "tokens/held": "of groups that were ready or in the batch",
    "tokens/rejected": "of rejected groups, so far",
    "tokens/discarded": "that are in no trajectory of their accepted group, so far",
    "tokens/trained": "tokens that entered the loss of this step's forward passes",
    "tokens/packed": "tokens that went through the model, shared beginnings counted once",
    "tokens/shared": "share of the tokens of separate sequences that sharing their beginnings saved",
    "samples/generated": "trajectories committed by rollouts since the step before",
    "tokens/refilled": "tokens whose KV cache engines computed again, for answers that were cut short or retracted",
    "tokens/inferred": "tokens of broken streams, whose version is the oldest that they can have",
    "requests/aborted": "answers that an update or the loss of their engine aborted, and that were continued",
    "requests/broken": "answers whose stream broke, and that were continued",
    "requests/overtaken": "requests that a publish overtook before their first piece, and that were asked anew",
    "episodes/retried": "episodes played anew, and rewards asked for anew, since the step before: rollout.retries",
    "bias/length": "mean length of trained trajectories against all that were generated, minus 1 (closed cohorts)",
    "bias/reward": "the same of rewards",
    "bias/difficulty": "the same of the mean rewards of groups",
    "prefix_cache/hit": "share of prompt tokens that the engines found in their cache",
    "step/skipped": "1 if no update was applied",
    "step/bad": "1 if it was skipped for its gradient norm",
    "time/step": "from the end of the step before to the end of this one",
    "time/wait_batch": "trainer waiting for a batch",
    "time/train": "advantages, packing, forward, backward, optimizer",
    "time/publish": "filling buckets, pause, announcement",
    "time/pause": "engines paused",
    "time/verify": "comparing the engines' checksums with those of the weights sent; 0 where it was not due",
    "engines/serving": "engines that serve the version",
    "time/engine_busy": "at least one request in flight since the step before",
    "time/since_start": "since the command was given",
    "bytes/published": "bytes of weights sent by this rank",
}

# The same file, if algo.kl.coefficient or algo.kl.measure_every requires a reference
STEP_REFERENCE = {"kl/reference": "k3 estimate of KL(policy || reference) over the trained tokens, at the step's start"}

# The same file, with algo.entropy_bonus, because computing it takes a pass over the logits
STEP_ENTROPY = {"entropy": "mean entropy of the policy at the trained tokens"}

# The same file, with algo.advantage=gae
STEP_CRITIC = {
    "critic/loss": "the critic's loss",
    "critic/grad_norm": "its gradient norm before clipping",
    "critic/skipped": "1 if its update was not applied",
    "critic/explained_variance": "1 - Var(returns - values) / Var(returns), before the update",
    "critic/value": "mean value before the update",
}

# The same file, if there is a teacher
STEP_TEACHER = {
    "kl/teacher": "k3 estimate of KL(policy || teacher) over the trained tokens, at the step's start; absent where "
    "rollout.temperature is not 1",
    "teacher/gap": "mean log-probability of the policy minus that of the teacher over them, the k1 estimate; at "
    "another rollout.temperature both at temperature 1, and divided by it",
    "teacher/tokens": "tokens that its engines were sent since the step before",
    "teacher/cached": "share of them that they found in their caches",
    "teacher/retried": "requests that were sent again since the step before",
    "time/teacher": "mean time from an episode's end until the teacher has scored it, since the step before",
}

# The same file, with algo.routing_replay; per token and layer with experts, in the passes with gradient
STEP_ROUTER = {
    "router/differs": "share whose experts are not those that the trainer's own router would have chosen",
    "router/overlap": "mean share of the experts that are",
}

# The same file, with record=true
STEP_RECORDING = {
    "time/recording": "of the rollout process's processors, the recording took since the step before",
    "recording/bytes": "written to it since the step before",
}

# The same file, with replay.compare; over all trajectories so far
STEP_COMPARISON = {
    "compare/same": "share whose tokens are those of the recorded run",
    "compare/gap": "largest difference of log-probabilities before the first other token",
    "compare/others": "groups that the recording lacks, or has with another prompt",
}

# The same file, with checkpoint.every, after a step that ended with a checkpoint
STEP_CHECKPOINT = {
    "time/save": "where the step before ended with a checkpoint: copying the state, after waiting for the one before",
}

# The same file, for each token age in the batch, in versions; the last one includes all older tokens
STEP_BY_LAG = {"logprob_gap/lag<k>": "mean |log-probability gap| of the tokens that are <k> versions old"}

# The same file, with rollout.max_running_groups=auto
STEP_ADAPTIVE = {
    "concurrency/limit": "episodes that may be in play",
    "concurrency/in_play": "episodes in play when the batch was taken",
    "concurrency/cuts": "how often the limit fell for the engines' sake, so far",
    "engines/running": "requests in the engines' batches",
    "engines/queued": "requests in their queues",
    "engines/cache_use": "share of their KV caches that running requests hold",
    "engines/prefill_wasted": "share of their time that goes into prefilling what they had prefilled before",
}

# The same file, for each task if there are several; <task> is its name
STEP_BY_TASK = {
    "groups/batch/<task>": "groups of the batch that are the task's",
    "reward/mean/<task>": "mean reward of their trajectories; absent where there are none",
    "groups/signal/<task>": "share of them whose rewards differ; absent where there are none",
}

# The same file, if episodes have several roles; <role> is one that the policy plays
STEP_BY_ROLE = {"reward/role/<role>": "mean reward of what it did, with that of the episode that all roles share"}

# The same file, with rollout.overlong_prompts=skip, once a question was too long
STEP_OVERLONG = {"prompts/overlong": "questions that were left out: all of tasks with an end, so far of the others"}

# The same file, where rewards have parts (Score.parts); <part> is the name of one
STEP_BY_PART = {"reward/part/<part>": "its mean over the answers that were scored since the step before"}

# The same file, where agents speak OpenAI's API (docs/proxy.md); counts so far
STEP_PROXY = {
    "proxy/turns": "answers that agents were given",
    "proxy/contexts_begun": "of them, those that went on from no earlier answer of their episode; beyond one an "
    "episode they are samples that edited histories cost",
    "proxy/refused": "requests that asked for what would spoil training",
    "proxy/abandoned": "requests whose agent or episode ended first",
}

# eval.jsonl: one object per evaluation and set; the sets of one evaluation stand together
EVAL = {
    "set": "name of the task whose held-out questions these are, or of the set (eval.sets)",
    "version_min": "oldest version that answered",
    "version_max": "newest version that answered; different from version_min only beside training",
    "questions": "questions asked",
    "failed": "answers that the judge or the engines failed; left out of all figures",
    "skipped": "evaluations that were due while this one was under way, and did not take place",
    "accuracy": "share answered right, greedily",
    "reward/mean": "mean reward of the greedy answers",
    "tokens/mean": "their mean number of tokens",
    "time/eval": "duration of the whole evaluation",
}

# The same file, with eval.samples = n; <k> is 1, 2, 4, ... up to n
EVAL_BY_K = {
    "pass@<k>": "unbiased estimate of the share of questions that k sampled answers solve; pass@1 is their accuracy",
}

# summary.json
SUMMARY = {
    "reason": "why the run ended",
    "steps": "steps trained",
    "reward/first": "mean reward of the first run.reward_window steps",
    "reward/last": "mean reward of the last run.reward_window steps",
    "accuracy/before": "held-out accuracy at version 0, the mean over sets; null without evaluation",
    "accuracy/after": "the same at the last version",
    "tokens/generated": "tokens that engines wrote for training",
    "tokens/trained": "tokens that entered the loss",
    "tokens_per_s/generated": "per second of training",
    "tokens_per_s/trained": "per second of training",
    "samples_per_s": "trajectories committed per second of training",
    "staleness/histogram": "trained trajectories by staleness",
    "share/trainer_idle": "time/wait_batch in the time of training",
    "share/publish": "time/publish in the time of training",
    "share/engine_busy": "time/engine_busy in the time of training",
    "pause/mean": "seconds that the engines were paused per publish",
    "logprob_gap/mean": "mean over steps",
    "step_time/median": "seconds",
    "time/start_up": "from the command to the first batch's arrival",
    "time/total": "from the command to the summary",
    "transport": "how weights travelled, and why",
    "ledger": "where every prompt, group, trajectory and token is at the end, as in ledger.json",
}

# The same file; <part> is trainer, engine, teacher or judge
SUMMARY_MACHINE = {
    "dtype/<part>": "number format that the part computed in, and why",
    "estimate/step": "seconds of a step as estimated before the run from the measured speed of the CPU",
    "estimate/run": "the same of the whole run",
    "estimate/error": "the estimate of the steps that were trained over time/total, minus 1",
}

# The same file, with checkpoint.every
SUMMARY_CHECKPOINT = {
    "checkpoint/last": "version of the last that is whole",
    "checkpoint/failed": "how many could not be written",
}

# The same file, for each evaluation set if there are several; <set> is its name
SUMMARY_BY_SET = {
    "accuracy/before/<set>": "accuracy of the set at version 0",
    "accuracy/after/<set>": "the same at the last version",
}


def unknown(names: Iterable[str]) -> list[str]:
    """Return the names that are not documented as fields of metrics.jsonl."""
    tables = [table for name, table in globals().items() if name.startswith("STEP") and isinstance(table, dict)]
    fields = [re.sub(r"<\w+>", ".+", re.escape(field).replace("\\<", "<")) for table in tables for field in table]
    pattern = re.compile("|".join(fields))
    return [name for name in names if not pattern.fullmatch(name)]
