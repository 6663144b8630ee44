"""The process from which ranks with TransformerEngine's Python modules are forked: tests/integration/ranks."""

from tests.integration.ranks.zygote import serve
from tests.te_stub.stand_in import install

if __name__ == "__main__":
    serve(install)
