"""Prints a configuration of Prometheus that scrapes these runs and loads the alert rules.

    python ops/prometheus/scrape_config.py RUN_FOLDER ... > prometheus.yml

Every run is a job of its own, because it has its own key (prometheus.token) and its own certificate authority.
Prometheus must be able to read both files, as the run's user does.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

RULES = Path(__file__).resolve().parent / "alerts.yml"


def job(run: Path) -> dict[str, Any]:
    """Return the scrape configuration of one run."""
    run = run.resolve()
    address = urlsplit(json.loads((run / "addresses.json").read_text())["rollout"])
    name = json.loads((run / "config.json").read_text())["run"]["name"]
    return {
        "job_name": f"asyncrl {run}",
        "scheme": address.scheme,
        "authorization": {"credentials_file": str(run / "prometheus.token")},
        **({"tls_config": {"ca_file": str(run / "tls" / "ca.pem")}} if address.scheme == "https" else {}),
        "static_configs": [{"targets": [address.netloc], "labels": {"run": name, "folder": str(run)}}],
    }


def configuration(runs: list[Path], seconds: int) -> dict[str, Any]:
    """Return the whole configuration."""
    return {
        "global": {"scrape_interval": f"{seconds}s", "evaluation_interval": f"{seconds}s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [job(run) for run in runs],
    }


def main() -> None:
    """Print the configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_FOLDER")
    parser.add_argument("--seconds", type=int, default=5, help="seconds between two scrapes")
    options = parser.parse_args()
    print(yaml.safe_dump(configuration(options.runs, options.seconds), sort_keys=False), end="")


if __name__ == "__main__":
    main()
