"""A worker that speaks the lines of the real one, and whose tasks are faults, by name. It needs no verifiers.

taskset.tasks    names of the tasks: one of the faults below, or the reward that is given
taskset.tells    the tasks are the names of its environment variables
taskset.first    number that goes into the keys
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

KEY = os.environ["ASYNCRL_PROXY_API_KEY"]
OK = {"ok": True, "is_timeout": False, "stop": "agent_completed", "errors": []}
FAULTS: dict[str, dict[str, Any]] = {
    "setup raises": {"ok": False, "stop": "task_error", "errors": [("TaskError", "no dataset", None)]},
    "reward raises": {"ok": False, "stop": "task_error", "errors": [("TaskError", "no judge", None)]},
    "finalize raises": {"ok": False, "stop": "task_error", "errors": [("TaskError", "no disk", None)]},
    "nan": {"rewards": {"mark": float("nan")}, "reward": float("nan")},
    "missing": {"rewards": {"mark": None}, "reward": 0.0},
    "unrewarded": {"rewards": {}, "reward": 0.0},
    "setup hangs": {"is_timeout": True, "stop": "setup_timeout", "rewards": {}, "reward": 0.0},
    "reward hangs": {"is_timeout": True, "stop": "scoring_timeout", "rewards": {"mark": None}, "reward": 0.0},
    "finalize hangs": {"is_timeout": True, "stop": "finalize_timeout"},
    "agent hangs": {"is_timeout": True, "stop": "agent_timeout"},
    "sandbox": {"ok": False, "errors": [("SandboxError", "no container", None)]},
    "tool": {"ok": False, "errors": [("ToolsetError", "the server did not start", None)]},
    "transport": {"ok": False, "errors": [("HarnessError", "httpx.ReadError", None)]},
    "harness": {"ok": False, "errors": [("HarnessError", "exit code 1", None)]},
    "refused": {"ok": False, "errors": [("ProviderError", "upstream 400: top_p: got 0.9", 400)]},
}


def send(message: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def ask(url: str, session: str, text: str) -> str:
    """Make one request, as verifiers' client does."""
    headers = {"Authorization": f"Bearer {KEY}", "X-Session-ID": session, "Content-Type": "application/json"}
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def trace(url: str, session: str, how: str, role: str, trainable: bool = True) -> dict[str, Any]:
    """Play one trace."""
    if how not in ("setup raises", "setup hangs"):
        ask(url, f"{session}.{role}" if role else session, "012")
    value = float(how) if how.replace(".", "").isdigit() else 0.0
    told = {**OK, "role": role, "agent": role or "agent", "trainable": trainable, "metrics": {"length": 3.0}}
    told |= {"rewards": {"mark": value}, "reward": value, **FAULTS.get(how, {})}
    told["errors"] = [dict(zip(("type", "message", "status"), error, strict=True)) for error in told["errors"]]
    return told


def play(url: str, asked: dict[str, Any], how: str) -> None:
    """Play one episode."""
    mark = Path(how.partition(" at ")[2])
    if how == "worker dies" or (how.startswith("dies once at ") and not mark.exists()):
        mark.touch() if mark.name else None
        print("the last words", file=sys.stderr, flush=True)
        os._exit(9)
    if how == "garbage":
        sys.stdout.write("well\n")
        sys.stdout.flush()
        return
    try:
        roles = {"two": (("left", "1"), ("right", "0.5"), ("watcher", "0"))}.get(how, (("", how),))
        traces = [trace(url, asked["session"], one, role, role != "watcher") for role, one in roles]
    except urllib.error.HTTPError:
        traces = [{**trace(url, asked["session"], "setup raises", "")}]
    if how == "long":
        traces[0]["errors"] = [{"type": "x" * (1 << 20), "message": "", "status": None}]
    told = {"played": asked["play"], "errors": [], "traces": traces}
    send({**told, "ok": all(one["ok"] for one in traces)})


def main() -> None:
    """Serve until stdin ends."""
    given = json.loads(sys.stdin.readline())
    taskset = given["env"]["taskset"]
    if taskset.get("refused"):
        send({"refused": {"field": "args.agent.sampling", "value": "{'top_p': 0.9}", "remedy": "Remove it."}})
        return
    if taskset.get("broken"):
        raise SystemExit("no such module")
    time.sleep(taskset.get("sleeps", 0))
    first = taskset.get("first", 0) + (os.getpid() if taskset.get("unstable") else 0)
    names = sorted(os.environ) if taskset.get("tells") else taskset.get("tasks", ["1"])
    keys = [hashlib.sha256(f"{name} {first}".encode()).hexdigest() for name in names]
    tasks = [{"key": key, "name": name, "prompt": "012"} for key, name in zip(keys, names, strict=True)]
    send({"ready": {"agents": ["agent"], "tasks": tasks}})
    if given["url"] is None:
        return
    for line in sys.stdin:
        asked = json.loads(line)
        if "play" in asked:
            arguments = (given["url"], asked, names[asked["task"]])
            threading.Thread(target=play, args=arguments, daemon=True).start()


if __name__ == "__main__":
    main()
