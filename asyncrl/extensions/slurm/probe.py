"""Reports what a machine of the job offers, as a line of JSON: python -m asyncrl.extensions.slurm.probe HOST INTERFACE
GPUS PORTS BLOCK.

Besides what placement needs, the report contains the facts that the preflight compares. HOST, INTERFACE and GPUS are
`-` if they are to be detected.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.launch.checks.versions import installed
from asyncrl.launch.machine import MachineFacts, count_gpus, this_machine, this_node
from asyncrl.launch.placement import Node
from asyncrl.network.addresses import node_name

MARK = "asyncrl-node "
"""Prefix of the line, because modules and prologs print as well."""


def main(host: str, interface: str, gpus: str, ports: str, block: str) -> int:
    """Print the report. Return 0, or 1 if it states a problem."""
    try:
        count = count_gpus(None if gpus == "-" else int(gpus))
        found = this_node(_named(host), _named(interface), count, int(ports), int(block))
        facts = this_machine(node_name(), installed())
        told: dict[str, Any] = {"node": asdict(replace(found, name=node_name())), "machine": asdict(facts)}
    except AsyncRLError as error:
        told = {"problem": f"{node_name()}: {error}"}
    sys.stdout.write(MARK + json.dumps(told) + "\n")  # in a single write, since other tasks write to the same stream
    sys.stdout.flush()
    return "problem" in told


def heard(output: str) -> tuple[list[tuple[Node, MachineFacts]], list[str]]:
    """Parse the reports: the machines that answered, and the problems of others."""
    nodes, problems = [], []
    for line in output.splitlines():
        _, mark, text = line.partition(MARK)
        if mark:
            told = json.loads(text)
            if "problem" in told:
                problems.append(str(told["problem"]))
            else:
                nodes.append((msgspec.convert(told["node"], Node), msgspec.convert(told["machine"], MachineFacts)))
    return nodes, problems


def _named(word: str) -> str | None:
    return None if word == "-" else word


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
