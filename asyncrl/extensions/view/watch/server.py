"""The live page's server. Every answer is read from the files of a run; nothing is written, and no process is asked.

    GET /                           the page. With ?token= it sets the cookie that all other requests need
    GET /static/NAME                its scripts and styles
    GET /api/runs                   the runs of the folder
    GET /api/events                 server-sent events: the marks of each run that has changed (WatchedRun.marks)
    GET /api/metrics?run=R          lines of metrics.jsonl from &after=N on, as columns; &fields=a,b
    GET /api/lines?run=R&file=F     lines of eval or warnings
    GET /api/settings?run=R&run=S   settings that differ between runs, or all of one run; overridden ones first
    GET /api/recording?run=R        batches, tasks and places of the recording
    GET /api/groups?run=R           groups, filtered by &step= &reason= &task= &reward=A:B &length= &staleness= &uid=
                                    &question= &text=; &cursor= of the previous page, &limit=
    GET /api/group?run=R&uid=U      one group with its tokens; &first= &count= of its trajectories
    GET /api/image?run=R&name=N     an image of the recording
    GET /api/batches?run=R          batches that have a timeline
    GET /api/anatomy?run=R&step=N   the anatomy of a batch (watch/anatomy.py)
    GET /api/fleet?run=R            status.json, and what each process does
    GET /api/advice?run=R           advice (watch/advice.py)

Access needs a token, in a cookie or as a bearer token: other users of a machine reach its loopback, too. The Host
header must be one of those served, so that no other site's name resolves to this page (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asyncrl.errors import RecordError
from asyncrl.extensions.view.inspection.page import STATIC as SHARED
from asyncrl.extensions.view.inspection.page import estimator_of
from asyncrl.extensions.view.inspection.rows import GroupFilter, bounds
from asyncrl.extensions.view.watch import advice
from asyncrl.extensions.view.watch.advice import WINDOW, Evidence
from asyncrl.extensions.view.watch.anatomy import anatomy, begins
from asyncrl.extensions.view.watch.ending import log_lines
from asyncrl.extensions.view.watch.runs import MOST_CHARACTERS, STATUS, RunFolder, WatchedRun, printable
from asyncrl.leases import SUFFIX
from asyncrl.network.addresses import FILE as ADDRESSES
from asyncrl.network.addresses import OVERRIDES
from asyncrl.progress import FOLDER as PROGRESS

STATIC = Path(__file__).with_name("static")
POLL_SECONDS = 0.4
"""Between two looks at the files, while a page is open."""
BEAT_SECONDS = 15.0
"""Between two events of a connection on which nothing changes, so that a closed one is noticed."""
MOST_DIFFERENT = 4
"""Settings by which a run of the list is told apart."""
OTHER_ANYWAY = ("run.dir", "run.name", "run.overwrite", "resume")
"""Settings that do not tell runs apart."""
UNFORESEEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What using a value raises that is not of the type that a run writes."""
MOST_GROUPS = 200
"""Groups of one answer."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
}


def app(folder: RunFolder, token: str, hosts: Sequence[str], ended: Callable[[], bool] = lambda: False) -> Starlette:
    """Build the page's app. `hosts` are the accepted names of this server; "*" accepts all. Once `ended` returns True,
    connections that wait for events are closed."""
    endpoints: dict[str, Callable[[WatchedRun, Request], Any]] = {
        "metrics": _metrics,
        "lines": lambda run, asked: run.rows(_one_of(asked, "file", ("eval", "warnings"))),
        "recording": lambda run, _: run.episodes.overview(),
        "groups": _groups,
        "group": _group,
        "batches": _batches,
        "anatomy": _anatomy,
        "fleet": _fleet,
        "advice": lambda run, _: [asdict(one) for one in advice.advise(evidence(run))],
    }
    routes = [
        Route("/", lambda _: Response((STATIC / "index.html").read_bytes(), media_type="text/html")),
        Route("/api/runs", lambda _: Answer(_listed(folder))),
        Route("/api/events", lambda _: StreamingResponse(_events(folder, ended), media_type="text/event-stream")),
        Route("/api/settings", lambda asked: _settings(folder, asked)),
        Route("/api/image", lambda asked: _image(folder, asked)),
        *(Route(f"/api/{name}", _of_run(folder, one)) for name, one in endpoints.items()),
        Mount("/static", StaticFiles(directory=STATIC, packages=[("asyncrl.extensions.view.inspection", SHARED.name)])),
    ]
    middleware = [
        Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False),
        Middleware(Guard, token=token),
        Middleware(GZipMiddleware, minimum_size=2000, compresslevel=3),
    ]
    handlers: dict[Any, Any] = dict.fromkeys(UNFORESEEN, _unforeseen)
    handlers |= dict.fromkeys((RecordError, OSError), _refused)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


class Answer(JSONResponse):
    """JSON that every browser reads and that can be sent, whatever the files of a run hold."""

    def render(self, content: Any) -> bytes:
        """Write NaN and infinities as null, and all but ASCII, such as lone surrogates, as escapes."""
        try:
            return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
        except ValueError:
            return json.dumps(_finite(content), allow_nan=False, separators=(",", ":")).encode()


class Guard:
    """Middleware that asks for the token, and sets the headers of every answer."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with 401."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        cookie = f"asyncrl_watch_{(scope.get('server') or ('', 0))[1]}"  # browsers share cookies among ports
        (given, *_) = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])
        if scope["path"] == "/" and self._right(given):
            answer = RedirectResponse("/", status_code=303)
            answer.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            return await answer(scope, receive, protected)
        request = HTTPConnection(scope)
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not (self._right(bearer) or self._right(request.cookies.get(cookie, ""))):
            text = "This page needs its token: open the address that asyncrl-watch printed."
            return await PlainTextResponse(text, status_code=401)(scope, receive, protected)
        return await self._app(scope, receive, protected)

    def _right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def evidence(run: WatchedRun) -> Evidence:
    """Collect what advice is based on."""
    addresses = run.document(ADDRESSES) or {}
    checkpoint = Path(addresses.get("resume") or "").name  # its version
    since = int(checkpoint) if checkpoint.isdecimal() else 0
    batches = run.latest_batches(WINDOW, since)
    late = [one.late for one in batches if one.late]
    seconds: Counter[tuple[str, str]] = Counter()
    for one in batches:
        seconds.update(one.seconds)  # adds
    end = run.ending()
    engines = (run.document(STATUS) or {}).get("engines", []) if end.state == "running" else []
    died = end.error if end.state == "died" else ""
    log = log_lines(run.folder, died) if died else []
    gpus = int(addresses.get("gpus", 0))
    rows, evaluations = run.rows("metrics"), run.rows("eval")
    return Evidence(rows, evaluations, run.config, engines, seconds, late, gpus, since, died, log)


# -- endpoints ------------------------------------------------------------------------------------------------


def _of_run(folder: RunFolder, endpoint: Callable[[WatchedRun, Request], Any]) -> Callable[[Request], Response]:
    """Return an endpoint that answers with JSON about one run, in a thread, one at a time for each run."""

    def answer(asked: Request) -> Response:
        run = folder.run(asked.query_params.get("run", ""))
        with run.lock:
            run.refresh()
            return Answer(endpoint(run, asked))

    return answer


def _metrics(run: WatchedRun, asked: Request) -> dict[str, Any]:
    rows = run.rows("metrics")
    after = _number(asked, "after", 0)
    names = asked.query_params.get("fields", "").split(",")
    columns = {name: [_value(row.get(name)) for row in rows[after:]] for name in {"step", *names} if name}
    return {"columns": columns, "after": len(rows), "names": sorted(rows[-1]) if rows else []}


def _groups(run: WatchedRun, asked: Request) -> dict[str, Any]:
    given = asked.query_params
    step = _number(asked, "step", -1)
    texts: dict[str, Any] = {name: given.get(name) or None for name in ("uid", "reason", "task", "question")}
    ranges: dict[str, Any] = {name: bounds(given.get(name, "")) for name in ("reward", "length", "staleness")}
    wanted = GroupFilter(**texts, **ranges, step=None if step < 0 else step)
    cursor = _number(asked, "cursor", -1)
    limit = min(MOST_GROUPS, _number(asked, "limit", 50))
    page = run.episodes.groups(wanted, given.get("text", ""), None if cursor < 0 else cursor, limit)
    return asdict(page)


def _group(run: WatchedRun, asked: Request) -> dict[str, Any]:
    first, count = _number(asked, "first", 0), _number(asked, "count", 4)
    shown = range(first, first + count)
    return run.episodes.content(asked.query_params.get("uid", ""), shown, estimator_of(run.config))


def _batches(run: WatchedRun, _: Request) -> list[dict[str, Any]]:
    run.timelines.refresh()
    found = [run.timelines.batches[step] for step in sorted(run.timelines.batches)]
    return [
        {
            "step": one.step,
            "groups": len(one.uids),
            "waited": one.taken - one.asked,
            "taken": one.taken,
            "last": one.last,
        }
        for one in found
    ]


def _anatomy(run: WatchedRun, asked: Request) -> dict[str, Any]:
    run.timelines.refresh()
    step = _number(asked, "step", -1)
    batch = run.timelines.batches.get(step)
    if batch is None:
        raise RecordError(f"batch {step} has no timeline: is timelines.record set?")
    groups = run.timelines.groups(batch)
    following = run.timelines.batches.get(step + 1)
    start = min(map(begins, groups), default=batch.asked)
    end = following.taken if following else time.time()
    return anatomy(batch, groups, run.timelines.between(start, end), run.timelines.publishes)


def _fleet(run: WatchedRun, _: Request) -> dict[str, Any]:
    processes = []
    for file in sorted((run.folder / PROGRESS).glob(f"*{SUFFIX}")):
        doing = run.document(f"{PROGRESS}/{file.name}") or {}
        processes.append({"name": printable(file.name.removesuffix(SUFFIX)), **doing})
    run.timelines.refresh()
    restarts = [
        {"process": one.attributes.get("process", ""), "how": one.attributes.get("how", ""), "ended": one.end}
        for one in run.timelines.restarts
    ]
    status, state = run.document(STATUS), run.ending().state
    if status and state != "running":  # what the file says was true when it was written
        status |= {"engines": [{**one, "state": state} for one in status.get("engines", [])]}
    age = time.time() - status["time"] if status and "time" in status else None
    elastic = [{name: one.get(name) for name in ("step", "reason", "done")} for one in run.rows("elastic")]
    told = {"processes": processes, "restarts": restarts, "elastic": elastic}
    return {"state": state, "status": status, "age": age, **told}


def _image(folder: RunFolder, asked: Request) -> Response:
    run = folder.run(asked.query_params.get("run", ""))
    with run.lock:
        return Response(run.episodes.image(asked.query_params.get("name", "")), media_type="image/png")


def _listed(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the runs, with the settings in which each differs from the others of its folder, as a sweep's do."""
    runs = folder.runs()
    beside: dict[str, list[str]] = {}
    for name in runs:
        beside.setdefault(name.rpartition("/")[0], []).append(name)
    differs: dict[str, list[list[Any]]] = {}
    for names in beside.values() if len(runs) > 1 else ():
        differs |= _differences({name: runs[name] for name in names})
    return [{**run.summary(), "differs": differs.get(name, [])} for name, run in runs.items()]


def _differences(runs: Mapping[str, WatchedRun]) -> dict[str, list[list[Any]]]:
    """Return some pairs [setting, value] for each run, of settings that differ between these runs; those that command
    lines set come first."""
    flat, first = dict[str, dict[str, Any]](), dict[str, None]()
    for name, run in runs.items():
        with suppress(RecordError, OSError, *UNFORESEEN):  # its own line says so
            flat[name] = _flat(run.config)
            first |= dict.fromkeys(_overridden(run))
    every = {setting for one in flat.values() for setting in one} - {*OTHER_ANYWAY}
    other = [one for one in sorted(every) if len({json.dumps(own.get(one)) for own in flat.values() if own}) > 1]
    set_first = sorted(other, key=lambda one: one not in first)[:MOST_DIFFERENT]
    return {name: [[one, _brief(own.get(one))] for one in set_first] for name, own in flat.items() if own}


def _brief(value: Any) -> Any:
    """Return a setting for the list of runs: long texts and lists as the beginning of their JSON."""
    return value if isinstance(value, bool | int | float | None) else json.dumps(value)[:MOST_CHARACTERS].strip('"')


def _overridden(run: WatchedRun) -> list[str]:
    """Return what the command line set: names of settings, and choices as NAME=OPTION."""
    return [str(name) for name in (run.document(OVERRIDES) or {}).get("names", [])]


def _settings(folder: RunFolder, asked: Request) -> Response:
    """Return the rows [setting, value in each run], where runs differ, and how many of them a command line set: these
    come first."""
    runs = [folder.run(name) for name in asked.query_params.getlist("run")]
    flat, given = [_flat(run.config) for run in runs], [_overridden(run) for run in runs]
    for own, words in zip(flat, given, strict=True):
        own |= {name: value for name, chosen, value in (word.partition("=") for word in words) if chosen}
    first = list(dict.fromkeys(word.partition("=")[0] for words in given for word in words))
    every = sorted({name for one in flat for name in one})
    top = [name for one in first for name in every if name == one or name.startswith(f"{one}.")] if first else []
    names = list(dict.fromkeys([*top, *every]))
    rows = [[name, *(one.get(name) for one in flat)] for name in names]
    shown = [row for row in rows if len(flat) < 2 or any(value != row[1] for value in row[2:])]
    return Answer({"rows": shown, "overridden": sum(row[0] in set(top) for row in shown)})


async def _events(folder: RunFolder, ended: Callable[[], bool] = lambda: False) -> AsyncIterator[str]:
    """Yield the marks of each run that has changed, and a comment when nothing does for a while."""
    told: dict[str, dict[str, float]] = {}
    beat = time.monotonic()
    while not ended():
        marks = await run_in_threadpool(lambda: {name: run.marks() for name, run in folder.runs().items()})
        changed = {name: own for name, own in marks.items() if told.get(name) != own}
        told = marks
        if changed:
            yield f"data: {json.dumps(changed)}\n\n"
        elif time.monotonic() - beat > BEAT_SECONDS:
            yield ": nothing has changed\n\n"
        else:
            await asyncio.sleep(POLL_SECONDS)
            continue
        beat = time.monotonic()


def _refused(_: Request, error: Exception) -> Response:
    return Answer({"error": printable(str(error))}, status_code=404)


def _unforeseen(_: Request, error: Exception) -> Response:
    """Answer that a run's files hold something else than a run writes, where only their use shows it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{type(error).__name__}: {error!s:.200}, in {Path(place.filename).name}:{place.lineno}"
    return Answer(
        {"error": printable(f"a file of this run does not hold what a run writes ({where})")}, status_code=422
    )


# -- parameters and values ------------------------------------------------------------------------------------


def _number(asked: Request, name: str, default: int) -> int:
    given = asked.query_params.get(name) or str(default)
    if not given.lstrip("-").isdigit():
        raise RecordError(f"{name}: got {given!r:.40}. Give a number.")
    return int(given)


def _one_of(asked: Request, name: str, choices: Sequence[str]) -> str:
    given = asked.query_params.get(name, "")
    if given not in choices:
        raise RecordError(f"{name}: got {given!r:.40}. Choose one of {', '.join(choices)}.")
    return given


def _value(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) and math.isfinite(value) else None if value != value else value


def _finite(value: Any) -> Any:
    """Return JSON without NaN and infinities, which browsers refuse."""
    if isinstance(value, Mapping):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = _flat(value, f"{before}{name}.") if isinstance(value, Mapping) and value else {before + name: value}
        found.update(inner)
    return found
