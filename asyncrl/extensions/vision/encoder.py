"""Images in training: their tokens in samples, their rows in packs, and the tower that encodes them.

Token ids that come from the engines hold one placeholder for each image. Here the k-th image token of all distinct
images of a batch gets the id `vocab_size + k`. Equal ids are then equal images, so that packs share a prefix with an
image exactly where it is the same one, and k says which of the batch's image embeddings stands in the row.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from asyncrl.algo.pack import Pack
from asyncrl.algo.samples import Sample
from asyncrl.config import Config
from asyncrl.errors import RecordError, WeightsError
from asyncrl.extensions.vision.extension import settings_of
from asyncrl.extensions.vision.sizes import ImageShape, deepstack, forbidden_ids, image_shape, mrope
from asyncrl.models.families import family_of
from asyncrl.parallel import Parallel
from asyncrl.schema import Group
from asyncrl.trainer.encoder import Encoder
from asyncrl.trainer.microbatches import Groups
from asyncrl.weights.folder import HFFolder


class ImageEmbedding(LanguageModelEmbedding):
    """Megatron's embedding, with the embeddings of images in their rows."""

    images: tuple[Tensor, Tensor] | None = None
    """Rows [M] of this rank, and the features of their images, [M, (1 + L) H]: the embedding, and what L of the first
    layers add."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return [N (/ tp under sequence parallelism), 1, H]."""
        words: Tensor = super().forward(*args, **kwargs)
        if self.images is None:
            return words
        rows, images = self.images
        return words.index_copy(0, rows, images[:, : words.shape[-1]].to(words.dtype)[:, None])

    def add_after(self, layer: torch.nn.Module) -> None:
        """Add the images' features of its number to the output of one of the first layers."""

        def added(_: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
            hidden, context = output
            if self.images is None:
                return output
            rows, images = self.images
            features = images.split(hidden.shape[-1], -1)[layer.layer_number]
            return hidden.index_add(0, rows, features.to(hidden.dtype)[:, None]), context

        layer.register_forward_hook(added)


@dataclass(frozen=True)
class Normalisation:
    """What the image processors of Qwen's models do with an image of the right size, in float32 on any device."""

    shape: ImageShape
    frames: int  # of a patch; an image repeats itself
    mean: tuple[float, ...]  # of each colour, between 0 and 1
    std: tuple[float, ...]

    @classmethod
    def of(cls, folder: Path, hf: dict[str, Any], shape: ImageShape) -> Normalisation:
        """Read the settings of an HF folder."""
        read = json.loads((folder / "preprocessor_config.json").read_text())
        frames = hf["vision_config"].get("temporal_patch_size", 2)
        return cls(shape, frames, tuple(read["image_mean"]), tuple(read["image_std"]))

    def patches(self, png: bytes, device: torch.device) -> Tensor:
        """Return the patches of an image as the tower reads them, [h * w, 3 * frames * side * side], in the order of
        its tokens."""
        from PIL import Image

        pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(png), formats=["PNG"]))).to(device)
        mean, std = (torch.tensor(values, device=device) for values in (self.mean, self.std))
        normal = pixels.float().mul_(1 / (255 * std)).sub_(mean / std)
        (_, h, w), side, merge = self.shape.grid(png), self.shape.patch, self.shape.merge
        blocks = normal.view(h // merge, merge, side, w // merge, merge, side, 3).permute(0, 3, 1, 4, 6, 2, 5)
        return blocks.reshape(h * w, 3, 1, side, side).expand(-1, -1, self.frames, -1, -1).flatten(1)


class ImageEncoder(Encoder):
    """The images of the present batch, and the vision tower on the ranks of the first pipeline stage."""

    def __init__(self, config: Config, hf: dict[str, Any], folder: Path, parallel: Parallel) -> None:
        """Load the tower from an HF folder. One that is trained belongs to a network, which loads it with its own
        weights."""
        settings, trainer, shape = settings_of(config), config.trainer, image_shape(hf)
        self.forbidden = forbidden_ids(hf)
        self.rates: Mapping[str, float] = {} if settings.lr is None else {"*visual.*": settings.lr}
        self._shape = shape
        self._levels = deepstack(hf)
        self._vocab = hf["vocab_size"]
        self._placeholder = hf["image_token_id"]
        self._device = parallel.device
        self._split = (parallel.tp, parallel.tp_rank) if trainer.sequence_parallel else (1, 0)
        self._frozen = settings.tower == "frozen"
        self.tower = load_tower(hf, folder, trainer.dtype, parallel.device) if parallel.pp_rank == 0 else None
        if self.tower and not self._frozen:
            for parameter in self.tower.requires_grad_().parameters():
                # each tensor-parallel rank then has the gradient of its own rows, which Megatron sums
                parameter.sequence_parallel = trainer.sequence_parallel  # type: ignore[attr-defined]
        self._normalised = Normalisation.of(folder, hf, shape)
        self._files: dict[str, bytes] = {}
        self._names: list[str] = []
        self._starts = np.zeros(1, np.int64)  # number of the first token of each image, and of all tokens
        self._embeddings: dict[str, Tensor] = {}

    def attach(self, model: GPTModel, *, trains: bool) -> None:
        """Let a network's first chunk of layers take images, and hold the tower if it is trained."""
        model.embedding.__class__ = ImageEmbedding
        for layer in model.decoder.layers[: self._levels]:
            model.embedding.add_after(layer)
        if trains and not self._frozen:
            model.visual = self.tower

    def states(self) -> list[Tensor]:
        """Return the tensors of a frozen tower, which take memory between two steps."""
        return list(self.tower.parameters()) if self.tower and self._frozen else []

    def begin(self, batch: Sequence[Group], groups: Groups) -> list[list[Sample]]:
        """Number the image tokens of a batch. Returns its samples with these tokens in place of placeholders."""
        self._files = {name: png for group in batch for name, png in group.images.items()}
        self._names = list(dict.fromkeys(name for group in groups for sample in group for name in sample.images))
        if absent := [name for name in self._names if name not in self._files]:
            raise RecordError(f"the batch does not hold its image {absent[0]}: record it again")
        self._starts = np.cumsum([0, *(self._shape.tokens(self._files[name]) for name in self._names)])
        self._embeddings = {name: self._embeddings[name] for name in self._names if name in self._embeddings}
        places = {name: number for number, name in enumerate(self._names)}
        return [[self._expanded(sample, places) for sample in group] for group in groups]

    def _expanded(self, sample: Sample, places: dict[str, int]) -> Sample:
        """Replace the placeholders of one sample. Those that the policy wrote are words."""
        if not sample.images:
            return sample
        split = len(sample.prompt_ids)
        ids = np.array(sample.prompt_ids + sample.token_ids)
        mask = np.array([False] * split + sample.mask)
        holders = np.flatnonzero((ids == self._placeholder) & ~mask)
        if len(holders) != len(sample.images):
            raise RecordError(f"a sample has {len(holders)} placeholders for {len(sample.images)} images")
        numbers = np.array([places[name] for name in sample.images])
        counts = np.ones(len(ids), np.int64)
        counts[holders] = self._starts[numbers + 1] - self._starts[numbers]
        ends, ids = np.cumsum(counts), np.repeat(ids, counts)
        for number, end, count in zip(numbers, ends[holders], counts[holders], strict=True):
            ids[end - count : end] = self._vocab + np.arange(self._starts[number], self._starts[number + 1])
        begin = int(ends[split - 1]) if split else 0
        grids = [self._shape.grid(self._files[name]) for name in sample.images]
        return replace(
            sample,
            prompt_ids=ids[:begin].tolist(),
            token_ids=ids[begin:].tolist(),
            mask=np.repeat(mask, counts)[begin:].tolist(),
            rope=mrope(ids, grids, self._vocab, self._shape.merge),
        )

    def placed(self, pack: Pack) -> Pack:
        """Return a pack, or this rank's part of one, with words in all rows, and which image tokens replace them in the
        rows that this rank embeds."""
        ids = pack.token_ids.numpy()
        rows = np.flatnonzero(ids >= self._vocab)
        pack = replace(pack, token_ids=torch.from_numpy(np.where(ids < self._vocab, ids, 0)))
        degree, rank = self._split
        first = rank * len(ids) // degree
        rows = rows[(rows >= first) & (rows < first + len(ids) // degree)]
        tokens = ids[rows] - self._vocab
        used, which = np.unique(np.searchsorted(self._starts, tokens, "right") - 1, return_inverse=True)
        starts, lengths = self._starts[used], self._starts[used + 1] - self._starts[used]
        shifts = np.cumsum(lengths) - lengths - starts  # from tokens of the batch to those of the pack's own images
        return replace(
            pack,
            images=tuple(self._names[number] for number in used),
            image_rows=torch.from_numpy(rows - first),
            image_places=torch.from_numpy(tokens + shifts[which]),
        )

    def embedded(self, model: GPTModel, pack: Pack, *, trains: bool) -> Callable[[], None]:
        """Encode the images of a pack, with a gradient if the model `trains` and the tower is not frozen. Return what
        gives them to the model."""
        images = self._embedded(pack, train=trains)

        def give() -> None:
            model.embedding.images = images

        return give

    def _embedded(self, pack: Pack, *, train: bool) -> tuple[Tensor, Tensor] | None:
        """Return this rank's rows [M] of images in a pack, and their features [M, (1 + L) H]; None without images."""
        if not pack.images:
            return None
        assert pack.image_rows is not None
        assert pack.image_places is not None
        with torch.set_grad_enabled(train and not self._frozen):
            kept = self._embeddings if self._frozen else {}
            if new := [name for name in pack.images if name not in kept]:
                kept.update(zip(new, self._encoded(new), strict=True))
            every = torch.cat([kept[name] for name in pack.images])
            return pack.image_rows, every.index_select(0, pack.image_places)

    def _encoded(self, names: list[str]) -> Sequence[Tensor]:
        """Run the tower on some images. Returns the features of each, [tokens, (1 + L) H]."""
        assert self.tower is not None, "only the first stage embeds"
        patches = [self._normalised.patches(self._files[name], self._device) for name in names]
        pixels = torch.cat(patches).to(next(self.tower.parameters()).dtype)
        grids = torch.tensor([self._shape.grid(self._files[name]) for name in names])
        found = self.tower(pixels, grid_thw=grids.to(self._device))
        features = torch.cat([found.pooler_output, *(getattr(found, "deepstack_features", None) or [])], -1)
        return features.split((grids.prod(-1) // self._shape.merge**2).tolist())


def load_tower(hf: dict[str, Any], folder: Path, dtype: str, device: torch.device) -> torch.nn.Module:
    """Return the vision tower of transformers with the weights of an HF folder. Raises WeightsError with a tensor that
    is missing, left over or of another shape."""
    from transformers import AutoConfig

    name, kind, of = hf["architectures"][0], hf["model_type"], family_of(hf).tower
    assert of is not None
    config = AutoConfig.for_model(kind, vision_config=hf["vision_config"]).vision_config
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    with torch.random.fork_rng(devices=[]), device:
        tower = getattr(module, of.module)._from_config(config, dtype=getattr(torch, dtype))
    prefix, states = of.prefix, tower.state_dict()
    with HFFolder(folder) as source, torch.no_grad():
        for key, tensor in states.items():
            tensor.copy_(source.read(prefix + key, tensor.shape))
        left = [key for key in source.names() if key.startswith(prefix) and key.removeprefix(prefix) not in states]
    if left:
        raise WeightsError(f"{folder} holds tensors that the vision tower of {name} has no place for: {left[:5]}")
    for part in tower.modules():  # rotary frequencies stay in float32 where mixed precision casts all buffers
        for buffer in list(part._non_persistent_buffers_set):
            setattr(part, buffer, part._buffers.pop(buffer))
    found: torch.nn.Module = tower.requires_grad_(False).eval()
    return found
