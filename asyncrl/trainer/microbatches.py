"""The packs of this data-parallel rank for one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence

from asyncrl.algo.pack import Pack, micro_batches, pack, spread
from asyncrl.algo.samples import Sample
from asyncrl.config import Trainer
from asyncrl.parallel import Parallel

Groups = Sequence[list[Sample]]

IDLE = [[Sample([0], [0], [False], number=0, first_row=0)]]
"""Fills a place without work: a token that is not trained."""


def packs_of_rank(groups: Groups, trainer: Trainer, parallel: Parallel) -> list[Pack]:
    """At least one. Ranks that share experts meet in every micro-batch, and interleaved stages run whole rounds: there
    every rank has as many as the one with the most."""
    p = parallel
    shares = [
        micro_batches(share, trainer.micro_batch_tokens, trainer.share_prompts)
        for share in spread(list(groups), p.dp, trainer.share_prompts)
    ]
    experts_cross_replicas = p.tp % (p.etp * p.ep) != 0
    count = max(len(share) for share in shares) if experts_cross_replicas else max(1, len(shares[p.dp_rank]))
    if trainer.virtual_pipeline > 1:
        count += -count % p.pp
    batches = shares[p.dp_rank] + [IDLE] * (count - len(shares[p.dp_rank]))
    multiple = p.tp if trainer.sequence_parallel else 1
    return [pack(batch, share=trainer.share_prompts, multiple=multiple).to(p.device) for batch in batches]
