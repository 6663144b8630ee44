"""What gives a network embeddings of more than words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.config import Config
from asyncrl.models.families import family_of
from asyncrl.parallel import Parallel
from asyncrl.schema import Group
from asyncrl.trainer.microbatches import Groups
from asyncrl.trainer.model import read_hf_config
from asyncrl.user_code import load

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class Encoder:
    """Encoder of what a batch holds beside text. This one is that of models which read text alone. The record of a
    family with a tower names a subclass (Tower.encoder), which is created with the configuration, the model's
    config.json, its folder, and the ranks."""

    forbidden: Sequence[int] = ()
    """Ids that the policy does not sample. They are left out of its softmax."""
    rates: Mapping[str, float] = {}
    """Peak learning rates of parameters that `attach` adds, by patterns of their names."""

    def attach(self, model: GPTModel, *, trains: bool) -> None:
        """Let a network's first chunk of layers take embeddings, on the first pipeline stage. With `trains` it gets the
        encoder's parameters, if they are trained."""

    def begin(self, batch: Sequence[Group], groups: Groups) -> Groups:
        """Take a batch, and return its samples as the network reads them."""
        return groups

    def placed(self, pack: Pack) -> Pack:
        """Return a pack, or this rank's part of one, with words in all rows, and what stands in place of some."""
        return pack

    def embedded(self, model: GPTModel, pack: Pack, *, trains: bool) -> Callable[[], None]:
        """Encode what stands in the rows of a pack, with a gradient if the model `trains`. Return what gives it to the
        model; it is called before each forward pass of a layer, also where layers are computed again."""
        assert not pack.images, "a network of a model with a tower was built without its encoder (encoder_of)"
        return lambda: None

    def states(self) -> list[Tensor]:
        """Return its tensors that no network holds, which take memory between two steps."""
        return []


def encoder_of(config: Config, folder: Path, parallel: Parallel) -> Encoder:
    """Return the encoder of the model of an HF folder, for this rank."""
    hf = read_hf_config(folder)
    if (tower := family_of(hf).tower) is None:
        return Encoder()
    made: Encoder = load(tower.encoder, "model.path")(config, hf, folder, parallel)
    return made
