"""Builds the Grafana board of a run, board.json:

    python ops/grafana/board.py > ops/grafana/board.json

Its only data source is the Prometheus that scrapes the runs (ops/README.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import GraphGradientMode, LegendDisplayMode, LegendPlacement, VisibilityMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
RUN = '{run=~"$run"}'


@dataclass(frozen=True)
class Query:
    """A series of a panel. `legend` uses Grafana's notation of labels."""

    expression: str
    legend: str = "{{run}}"


@dataclass(frozen=True)
class Plot:
    """A panel."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    description: str = ""


def step(name: str, legend: str = "{{run}}") -> Query:
    """Return the newest value of a field of metrics.jsonl."""
    return Query(f"asyncrl_step_{name}{RUN}", legend)


def parts(name: str, *fields: str) -> tuple[Query, ...]:
    """Return several fields that begin alike, each under its own name."""
    return tuple(step(f"{name}_{field}", f"{{{{run}}}} {field}") for field in fields)


def quantiles(name: str, by: str, labels: str = "") -> tuple[Query, ...]:
    """Return median and 99th percentile of a histogram."""
    chosen = RUN.replace("}", f", {labels}}}") if labels else RUN
    return tuple(
        Query(
            f"histogram_quantile({share}, sum by (run, {by}, le) (rate(asyncrl_{name}_seconds_bucket{chosen}[5m])))",
            f"{{{{run}}}} {{{{{by}}}}} p{round(100 * share)}",
        )
        for share in (0.5, 0.99)
    )


ROWS: dict[str, tuple[Plot, ...]] = {
    "Learning": (
        Plot("Reward", "none", (step("reward_mean"),)),
        Plot("Held-out accuracy", "percentunit", (Query(f"asyncrl_eval_accuracy{RUN}", "{{run}} {{set}}"),)),
        Plot("Pass rate by task", "percentunit", (step("pass_rate_by_task", "{{run}} {{task}}"),)),
        Plot("Groups by difficulty", "percentunit", (step("difficulty_by_solved", "{{run}} {{solved}}"),)),
        Plot("Groups with a signal", "percentunit", (step("groups_signal"),)),
        Plot("Tokens per completion", "none", (step("completion_length"),)),
        Plot("Log-probability gap", "none", parts("logprob_gap", "mean", "p99")),
        Plot("Staleness", "none", parts("staleness", "mean", "max"), "In versions."),
    ),
    "Trainer": (
        Plot("Time of a step", "s", parts("time", "step", "wait_batch", "train", "publish", "pause")),
        Plot("Time of training", "s", parts("time", "forward", "backward", "optimizer", "communication")),
        Plot("Tokens per second of a rank", "none", (step("tokens_per_s_rank"),)),
        Plot("Version", "none", (Query(f"asyncrl_version{RUN}"),)),
        Plot("Gradient norm and loss", "none", (step("grad_norm", "{{run}} norm"), step("loss", "{{run}} loss"))),
        Plot("Memory", "bytes", (step("memory_peak"),)),
    ),
    "Rollouts": (
        Plot("Running episodes by phase", "none", (Query(f"asyncrl_episodes_running{RUN}", "{{run}} {{phase}}"),)),
        Plot("Time of an episode in each phase", "s", quantiles("episode_phase", "phase", 'purpose="training"')),
        Plot("Groups by state", "none", (Query(f"asyncrl_groups{RUN}", "{{run}} {{state}}"),)),
        Plot(
            "Groups that ended, per second",
            "none",
            (Query(f"sum by (run, outcome) (rate(asyncrl_groups_ended_total{RUN}[5m]))", "{{run}} {{outcome}}"),),
        ),
        Plot("Waits for a batch", "s", quantiles("batch_wait", "run")),
        Plot("Requests held back for a publish", "s", quantiles("publish_hold", "run")),
        Plot(
            "Waits for the last group alone",
            "percentunit",
            (step("straggler_share"),),
            "Of the time between two batches. The steps' straggler/task and straggler/tool say whose they are.",
        ),
        Plot("Warnings", "none", (Query(f"asyncrl_warnings_total{RUN}"),)),
    ),
    "Tools and environments": (
        Plot("Time of a call", "s", quantiles("call", "name")),
        Plot(
            "Calls that fail",
            "percentunit",
            (
                Query(
                    f"sum by (run, name) (rate(asyncrl_call_failures_total{RUN}[5m])) "
                    f"/ sum by (run, name) (rate(asyncrl_call_seconds_count{RUN}[5m]))",
                    "{{run}} {{name}}",
                ),
            ),
        ),
    ),
    "Engines": (
        Plot("Tokens per second", "none", (Query(f"asyncrl_engine_tokens_per_second{RUN}", "{{engine}}"),)),
        Plot(
            "KV cache in use",
            "percentunit",
            (Query(f"asyncrl_engine_cache_tokens{RUN} / asyncrl_engine_cache_capacity_tokens{RUN}", "{{engine}}"),),
        ),
        Plot(
            "Requests",
            "none",
            (
                Query(f"asyncrl_engine_requests_running{RUN}", "{{engine}} running"),
                Query(f"asyncrl_engine_requests_queued{RUN}", "{{engine}} queued"),
            ),
        ),
        Plot("Prefix cache hits", "percentunit", (Query(f"asyncrl_engine_cache_hit_ratio{RUN}", "{{engine}}"),)),
        Plot(
            "Preemptions per second",
            "none",
            (Query(f"rate(asyncrl_engine_preemptions_total{RUN}[5m])", "{{engine}}"),),
        ),
        Plot("Engines that answer", "none", (Query(f"asyncrl_engine_up{RUN}", "{{engine}}"),)),
    ),
}
OF_TOOLS = "Tools and environments"
"""Row without data in a run without tools."""


def expressions(row: str) -> list[str]:
    """Return the queries of a row as Prometheus gets them if every run is chosen."""
    return [query.expression.replace("$run", ".*") for plot in ROWS[row] for query in plot.queries]


def panel(plot: Plot) -> timeseries.Panel:
    """Return the builder of a panel."""
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    built = (
        timeseries.Panel()
        .title(plot.title)
        .description(plot.description)
        .datasource(SOURCE)
        .unit(plot.unit)
        .span(8)
        .height(8)
        .line_width(1.5)
        .fill_opacity(8)
        .gradient_mode(GraphGradientMode.OPACITY)
        .show_points(VisibilityMode.NEVER)
        .legend(legend.show_legend(True))
    )
    for number, query in enumerate(plot.queries):
        target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).range()
        built = built.with_target(target.ref_id(chr(ord("A") + number)).datasource(SOURCE))
    return built


def board() -> dashboard.Dashboard:
    """Return the builder of the board."""
    source = dashboard.DatasourceVariable("source").label("Prometheus").type("prometheus")
    runs = (
        dashboard.QueryVariable("run")
        .label("Run")
        .datasource(SOURCE)
        .query("label_values(asyncrl_run, run)")
        .multi(True)
        .include_all(True)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    )
    built = (
        dashboard.Dashboard("asyncrl")
        .uid("asyncrl")
        .tags(["asyncrl"])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(source)
        .with_variable(runs)
    )
    for title, plots in ROWS.items():
        built = built.with_row(dashboard.Row(title))
        for plot in plots:
            built = built.with_panel(panel(plot))
    return built


def rendered() -> str:
    """Return the board as JSON."""
    return JSONEncoder(sort_keys=True, indent=2).encode(board().build()) + "\n"


if __name__ == "__main__":
    print(rendered(), end="")
