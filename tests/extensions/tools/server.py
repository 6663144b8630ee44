"""A small MCP server over stdio, without the mcp package (it is up in no time), that misbehaves when it is asked to.

echo(text)   the text                         hang()     never answers, others are answered meanwhile
count()      how often it was called          stall()    never answers, nor anybody else any more
fail(text)   the tool reports an error        die()      exits with 3, after a word on stderr
big(size)    so many characters               garbage()  a line that is no message, then the answer
nonsense()   a result that is none            pid()      of the server, and of a child that sleeps
invalid()    a JSON-RPC error: -32602         internal() a JSON-RPC error: -32603
shot()       a text and an image
"""

import json
import os
import subprocess
import sys
import time

TOOLS = {
    "echo": "text",
    "fail": "text",
    "big": "size",
    **dict.fromkeys(("count", "hang", "stall", "die", "garbage", "nonsense", "pid", "invalid", "internal", "shot")),
}


def schema(name):
    argument = TOOLS[name]
    kind = {"size": "integer"}.get(argument, "string")
    properties = {argument: {"type": kind}} if argument else {}
    return {"name": name, "inputSchema": {"type": "object", "properties": properties, "required": list(properties)}}


def text(value, error=False):
    return {"result": {"content": [{"type": "text", "text": str(value)}], "isError": error}}


def call(name, arguments, count):
    if name == "stall":
        time.sleep(1000)
    if name == "die":
        sys.exit("a last word")
    if name == "garbage":
        print("Listening on stdio!", flush=True)
    if name == "pid":
        child = subprocess.Popen(["sleep", "1000"])
        return text(f"{os.getpid()} {child.pid}")
    return {
        "echo": lambda: text(arguments["text"]),
        "count": lambda: text(count),
        "fail": lambda: text(arguments["text"], error=True),
        "big": lambda: text("x" * arguments["size"]),
        "hang": lambda: None,
        "shot": lambda: {
            "result": {
                "content": [
                    {"type": "text", "text": "here"},
                    {"type": "image", "data": "cG5n", "mimeType": "image/png"},
                ]
            }
        },
        "garbage": lambda: text("here"),
        "nonsense": lambda: {"result": {"content": 7}},
        "invalid": lambda: {"error": {"code": -32602, "message": "not like that"}},
        "internal": lambda: {"error": {"code": -32603, "message": "out of order"}},
    }[name]()


def answer(method, params, count):
    if method == "initialize":
        return {
            "result": {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "s", "version": "1"},
            }
        }
    if method == "tools/list":
        return {"result": {"tools": [schema(name) for name in TOOLS]}}
    if method == "tools/call":
        return call(params["name"], params.get("arguments", {}), count)
    return {"error": {"code": -32601, "message": "no such method"}}


def main():
    if "--silent" in sys.argv:
        time.sleep(1000)
    if "--once" in sys.argv:  # comes up the first time only
        marker = sys.argv[sys.argv.index("--once") + 1]
        if os.path.exists(marker):
            sys.exit("already")
        open(marker, "w").close()
    count = 0
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        count += request["method"] == "tools/call"
        found = answer(request["method"], request.get("params", {}), count)
        if found is not None:
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **found}), flush=True)


if __name__ == "__main__":
    main()
