"""Program that runs one SGLang server: python -m asyncrl.engine.serve ARGUMENTS OF sglang.launch_server.

This is the stock server, with hooks (sglang_hooks.py), a warm-up for GPUs (warmup.py), what extensions install
(lookup.py), and on a CPU the shims of its platform. The run's API key and ports come from the environment, because
every user of the machine can read a command line. The module is not a `__main__.py`, because multiprocessing would not
re-import that in spawned children, which need them too.
"""

from asyncrl import import_hooks

# isort: split
import os
import shlex
import sys
from importlib.metadata import version

from asyncrl import platforms
from asyncrl.engine import sglang_hooks, warmup
from asyncrl.lookup import install_in_engine
from asyncrl.network import stores
from asyncrl.network.addresses import ARGUMENTS
from asyncrl.network.ports import REPLICA_PORTS, free_block

BUILT_FOR = "2.13"
"""Version of torch for which the lock's SGLang has its prefix cache in Rust, which breaks with others, and kernels."""
WITH_OTHERS = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python", "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}
"""Environment of engines with another torch: the prefix cache in Python, and kernels of an earlier version."""


def for_torch(installed: str) -> dict[str, str]:
    """Return the additional environment of an engine with this version of torch."""
    return {} if installed.startswith(f"{BUILT_FOR}.") else WITH_OTHERS


for variable, setting in for_torch(version("torch")).items():
    os.environ.setdefault(variable, setting)
if "--enable-trace" not in sys.argv:  # SGLang would import the exporters, which takes 0.1 s
    sys.modules["opentelemetry.exporter"] = None  # type: ignore[assignment]
platforms.here().prepare_engine()
sys.modules["megatron"] = None  # type: ignore[assignment]  # a debugging tool of SGLang would import it, in 0.5 s
sglang_hooks.install(sys.argv)
warmup.install()
install_in_engine(sys.argv)
stores.bind()

if __name__ == "__main__":
    import sglang.srt.entrypoints.http_server  # noqa: F401  # run_server would import it later
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    import_hooks.done()
    arguments = [*sys.argv[1:], *shlex.split(os.environ.get(ARGUMENTS, ""))]
    if "--enable-dp-attention" in arguments and "--dist-init-addr" not in arguments:
        arguments += ["--dist-init-addr", f"127.0.0.1:{free_block('127.0.0.1', REPLICA_PORTS)}"]
    if key := os.environ.get("ASYNCRL_API_KEY"):
        arguments += ["--api-key", key, "--admin-api-key", key]
    if incarnation := os.environ.get("ASYNCRL_INCARNATION"):  # its first weights are no version of the run
        arguments += ["--weight-version", incarnation]
    try:
        run_server(prepare_server_args(arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
