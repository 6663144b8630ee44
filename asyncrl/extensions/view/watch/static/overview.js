import { Chart } from "./charts.js";
import { make, short } from "./dom.js";
import { card } from "./fleet.js";
import { api, compared, labelOf, metricsOf, state } from "./store.js";

// [title, fields with their labels, how they are computed from a step's columns, options]
const rate = (name) => (of, at) => (of["time/step"][at] ? of[name][at] / of["time/step"][at] : null);
const CHARTS = [
  { title: "Reward", series: { mean: "reward/mean" } },
  { title: "Held-out accuracy", evaluation: true },
  { title: "Answer length, tokens", series: { mean: "completion/length" } },
  { title: "Staleness, versions", series: { mean: "staleness/mean", max: "staleness/max" } },
  { title: "Gap to engines, nats", series: { mean: "logprob_gap/mean", p99: "logprob_gap/p99" } },
  { title: "Generated tokens/s", series: { rate: ["tokens/generated", "time/step"] }, compute: rate("tokens/generated") },
  { title: "Step, s", series: { all: "time/step", wait: "time/wait_batch", train: "time/train", publish: "time/publish" } },
  { title: "Groups with a signal", series: { share: "groups/signal" } },
  { title: "Loss", series: { loss: "loss" }, options: { fromZero: false } },
  { title: "Gradient norm", series: { norm: "grad_norm" } },
  { title: "Entropy", series: { entropy: "entropy" } },
  { title: "KL to the reference", series: { kl: "kl/reference" } },
];
const EXTRA = "asyncrl-watch-charts";
const extras = () => JSON.parse(localStorage.getItem(EXTRA) ?? "[]");

export class Overview {
  constructor(run) {
    this.runs = [run, ...compared()];
    this.grid = make("section", { class: "charts" });
    this.advice = make("section", { class: "advice" });
    this.notes = make("section");
    this.settings = make("section");
    this.given = make("p", { class: "chips given" });
    this.chosen = make("select", { "aria-label": "add a chart", onchange: () => this.add(this.chosen.value) });
    this.node = make("div", {}, this.given, this.advice, this.grid, make("p", { class: "row" }, this.chosen), this.notes, this.settings);
    this.charts = [];
  }

  get definitions() {
    return [...CHARTS, ...extras().map((name) => ({ title: name, series: { value: name }, extra: true, options: { fromZero: false } }))];
  }

  async opened() {
    await this.showMetrics();
    await Promise.all([this.showLines(), this.showSettings(), this.showAdvice()]);
  }

  async changed(names) {
    if (names.has("metrics") || names.has("eval") || names.has("config")) await this.showMetrics();
    if (names.has("warnings")) await this.showLines();
    if (names.has("config")) await this.showSettings();
    if (["metrics", "eval", "summary", "silent", "config"].some((name) => names.has(name))) await this.showAdvice();
  }

  closed() { this.charts.forEach((chart) => chart.remove()); }

  async showMetrics() {
    const fields = ["time/step", ...this.definitions.flatMap((chart) => Object.values(chart.series ?? {}).flat())];
    const metrics = this.runs.map(metricsOf);
    const [evaluations] = await Promise.all([
      Promise.all(this.runs.map((run) => api("lines", { run, file: "eval" }))),
      ...metrics.map((one) => one.fetch(fields)),
    ]);
    this.definitions.forEach((definition) => {
      const data = definition.evaluation ? evaluated(evaluations) : this.columns(definition, metrics);
      this.draw(definition, data);
    });
    this.offer(metrics[0].names);
  }

  // With several runs, a chart has a line for each run, of its first field; alone, a line for each field.
  columns({ series, compute }, metrics) {
    const [first] = Object.values(series);
    const lines = this.runs.length > 1 ? metrics.map((one) => [one, first]) : Object.values(series).map((field) => [metrics[0], field]);
    const parts = lines.map(([one, field]) => {
      const value = compute ?? ((of, at) => of[field][at]);
      return [one.columns.step, one.columns.step.map((_, at) => value(one.columns, at) ?? null)];
    });
    const labels = this.runs.length > 1 ? this.runs.map(labelOf) : Object.keys(series);
    return { labels, parts };
  }

  draw(definition, { labels, parts }) {
    const filled = parts.map(([, values]) => values.some((value) => value !== null));
    const keep = this.runs.length > 1 ? filled.some(Boolean) : filled;
    if (Array.isArray(keep)) [labels, parts] = [labels.filter((_, at) => keep[at]), parts.filter((_, at) => keep[at])];
    let chart = this.charts.find((one) => one.title === definition.title);
    if (!parts.length || keep === false || !filled.some(Boolean)) return;
    if (!chart || chart.labels.join() !== labels.join()) {
      const made = Object.assign(new Chart(definition.title, labels, { ...definition.options, unnamed: this.runs.length > 1 }), { title: definition.title });
      if (definition.extra) made.node.querySelector("b").after(make("button", { class: "quiet", title: "remove", onclick: () => this.drop(made) }, "×"));
      if (chart) { chart.node.replaceWith(made.node); this.charts.splice(this.charts.indexOf(chart), 1, made); chart.remove(); }
      else { this.charts.push(made); this.place(made); }
      chart = made;
    }
    chart.show(uPlot.join(parts.map(([xs, ys]) => [xs, ys])));
  }

  // Charts stand in the order of their definitions, though some get their first values later.
  place(made) {
    const order = this.definitions.map((one) => one.title);
    const after = [...this.grid.children].find((node) => order.indexOf(node.dataset.chart) > order.indexOf(made.title));
    this.grid.insertBefore(made.node, after ?? null);
  }

  offer(names) {
    if (this.chosen.options.length > 1 && this.offered === names.length) return;
    this.offered = names.length;
    const options = names.filter((name) => name !== "step" && !extras().includes(name)).map((name) => make("option", {}, name));
    this.chosen.replaceChildren(make("option", { value: "" }, "add a chart of any metric …"), ...options);
  }

  async add(name) {
    if (!name) return;
    localStorage.setItem(EXTRA, JSON.stringify([...extras(), name]));
    this.offered = 0;
    await this.showMetrics();
  }

  drop(chart) {
    localStorage.setItem(EXTRA, JSON.stringify(extras().filter((name) => name !== chart.title)));
    this.charts = this.charts.filter((one) => one !== chart);
    chart.remove();
    this.offered = 0;
    this.offer(metricsOf(this.runs[0]).names);
  }

  async showAdvice() {
    const found = await api("advice", { run: state.run });
    const [binding, others] = [found.filter((one) => one.rule === "binding"), found.filter((one) => one.rule !== "binding")];
    this.advice.replaceChildren(...[...others.slice(0, 2), ...binding].map((one) => card(one, false)));
  }

  async showLines() {
    const warnings = await api("lines", { run: this.runs[0], file: "warnings" });
    const rows = warnings.slice(-8).reverse().map((one) => make("tr", {}, make("td", { class: "number" }, `version ${one.version}`), make("td", {}, one.warning)));
    this.notes.replaceChildren(...(rows.length ? [make("h2", {}, "Warnings"), make("table", {}, make("tbody", {}, ...rows))] : []));
  }

  async showSettings() {
    const { rows, overridden } = await api("settings", { run: this.runs });
    const several = this.runs.length > 1;
    const body = rows.map(([name, ...values], at) => make("tr", { class: at < overridden ? "overridden" : null }, make("td", {}, make("code", {}, name)), ...values.map((value) => make("td", {}, value === null ? make("span", { class: "faint" }, "null") : typeof value === "string" ? value : JSON.stringify(value)))));
    const table = make("table", { class: "settings" }, several ? make("thead", {}, make("tr", {}, make("th", {}, "setting"), ...this.runs.map((run) => make("th", {}, labelOf(run))))) : null, make("tbody", {}, ...body));
    const given = overridden ? `; the first ${overridden} were set for this run` : "";
    const title = several ? `Settings that differ: ${rows.length}` : `Settings (${rows.length}${given})`;
    const details = make("details", {}, make("summary", {}, title), table);
    details.open = several || Boolean(this.settings.querySelector("details")?.open);
    const chosen = several ? "" : rows.slice(0, overridden).map(([name, value]) => make("code", { class: "chip" }, `${name}=${typeof value === "string" ? value : JSON.stringify(value)}`));
    this.given.replaceChildren(...(chosen.length ? [make("span", { class: "faint" }, "set for this run "), ...chosen] : []));
    this.settings.replaceChildren(details);
  }
}

// Evaluations of one run: a line for each set; of several runs: the mean over sets of each.
function evaluated(runs) {
  if (runs.length > 1) {
    return { labels: [state.run, ...compared()].map(labelOf), parts: runs.map((rows) => points(rows)) };
  }
  const sets = [...new Set(runs[0].map((row) => row.set))];
  return { labels: sets, parts: sets.map((name) => points(runs[0].filter((row) => row.set === name))) };
}

function points(rows) {
  const found = new Map();
  for (const row of rows) found.set(row.version_max, [...(found.get(row.version_max) ?? []), row.accuracy]);
  const versions = [...found.keys()].sort((one, other) => one - other);
  return [versions, versions.map((version) => found.get(version).reduce((sum, value) => sum + value, 0) / found.get(version).length)];
}
