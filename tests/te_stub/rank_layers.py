"""One rank of test_transformer_engine.py: python rank_layers.py FOLDER, under torchrun.

Builds every model of FOLDER with both kinds of layers, compares their parameters, checks which products add gradients
to the buffers, and writes which functions of TransformerEngine's extension one pass forward and backward has called.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from asyncrl.algo.pack import pack
from asyncrl.config import TrainerConfig
from asyncrl.trainer import model as megatron
from asyncrl.trainer.network import forward
from asyncrl.trainer.parallel import initialize
from asyncrl.weights.names import local_name
from tests.integration.families import groups
from tests.te_stub.stand_in import CALLS


def main(folder: Path) -> None:
    settings = json.loads((folder / "single.json").read_text())
    trainer = TrainerConfig.model_validate(settings["trainer"])
    initialize(trainer, gpu=False, seed=0, timeout=60.0)
    calls = {}
    for name in settings["models"]:
        hf = megatron.read_hf_config(folder / name)
        built = {}
        for layers in ("local", "transformer_engine"):
            one = trainer.model_copy(update={"layers": layers})
            built[layers] = megatron.build_model(hf, megatron.transformer_config(hf, one))
        local, te = ({n: p.shape for n, p in model.named_parameters()} for model in built.values())
        assert {local_name(n): shape for n, shape in te.items()} == local, name
        CALLS.clear()
        model = built["transformer_engine"]
        for parameter in model.parameters():
            parameter.main_grad = parameter.data.new_zeros(parameter.shape)
            parameter.grad_added_to_main_grad = False
        forward(model, model, pack(groups())).sum().backward()
        fused = {n for n, p in model.named_parameters() if p.grad_added_to_main_grad}
        assert fused == {n for n in te if re.search(r"\.linear_\w+\.weight\d*$", n)}, name
        calls[name] = dict(CALLS)
    (folder / "calls.json").write_text(json.dumps(calls))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
