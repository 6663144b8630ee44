import { make, seconds, short } from "./dom.js";
import { api } from "./store.js";

// What the engines, the processes and the running groups do now: status.json, which is at most seconds old while a run runs.
export class Fleet {
  constructor(run) {
    this.run = run;
    this.node = make("div", { class: "fleet" });
    this.unfolded = new Set(); // groups whose episodes are listed
  }

  async opened() { await this.show(); }
  async changed(names) { if (["status", "metrics", "elastic", "summary", "silent"].some((name) => names.has(name))) await this.show(); }

  async show() {
    const { state, status, age, processes, restarts, elastic } = await api("fleet", { run: this.run });
    const parts = [];
    if (state !== "running") parts.push(make("p", { class: "over" }, `${state === "silent" ? "This run shows no sign of life" : `This run is over (${state})`}. What follows is the last that was known.`));
    if (!status) parts.push(make("p", { class: "empty" }, "This run has not written status.json: it has not started, or was made by an older version."));
    else parts.push(...this.now(status, age), ...this.engines(status.engines ?? [], state));
    parts.push(...this.processes(processes), ...this.restarts(restarts), ...this.elastic(elastic));
    if (status) parts.push(...this.groups(status));
    this.node.replaceChildren(...parts);
  }

  now(status, age) {
    const phases = Object.entries(status.episodes ?? {});
    const cells = [["version", status.version], ["episodes", phases.reduce((sum, [, count]) => sum + count, 0)], ["requests", status.holding ? "held for a publish" : "flowing"], ["updated", age === null ? "–" : `${seconds(Math.max(0, age))} ago`]];
    return [
      make("div", { class: "cells" }, ...cells.map(([name, value]) => make("div", {}, make("span", { class: "faint" }, name), make("b", {}, String(value))))),
      make("p", { class: "waits" }, status.waiting_for ?? ""),
      phases.length ? strip(phases) : "",
    ];
  }

  engines(engines, state) {
    if (!engines.length) return [];
    const extra = [...new Set(engines.flatMap((one) => Object.keys(one)))].filter((name) => !["url", "state", "version", "running", "waiting", "used", "capacity", "prefilled", "prefill_seconds"].includes(name) && engines.some((one) => typeof one[name] === "number"));
    const head = ["engine", "state", "version", "running", "queued", "KV cache", "prefilled", ...extra];
    const body = engines.map((one) => [
      make("code", {}, one.url ?? ""), make("span", { class: "state" }, make("i", { class: `dot ${one.state}` }), ` ${one.state}`), one.version ?? "–", short(one.running), short(one.waiting),
      meter(one.used, one.capacity), one.prefilled === undefined ? "–" : `${short(one.prefilled)} tokens in ${seconds(one.prefill_seconds)}`, ...extra.map((name) => short(one[name])),
    ]);
    const serving = state === "running" ? `Engines: ${engines.filter((one) => one.state === "serving").length} of ${engines.length} serve` : `Engines: ${engines.length}, of which none serves any more`;
    return [make("h2", {}, serving), table(head, body)];
  }

  processes(processes) {
    if (!processes.length) return [];
    const body = processes.map((one) => [one.name, one.doing ?? "", seconds(one.seconds), make("span", { class: one.seconds > 0.5 * one.within ? "bad" : "faint" }, `deadline ${seconds(one.within)}`)]);
    return [make("h2", {}, "Processes"), table(["process", "does", "since", ""], body)];
  }

  restarts(restarts) {
    if (!restarts.length) return [];
    const body = restarts.slice(-20).reverse().map((one) => [one.process, one.how, new Date(1000 * one.ended).toLocaleString()]);
    return [make("h2", {}, `Restarts: ${restarts.length}`), table(["process", "after", "at"], body)];
  }

  elastic(decisions) {
    if (!decisions.length) return [];
    const body = decisions.slice(-20).reverse().map((one) => [one.step, one.reason, one.done]);
    return [make("h2", {}, `Elastic decisions: ${decisions.length}`), table(["step", "decision", "what was done"], body)];
  }

  // The phases of a group's episodes; unfolded, a line for each of them.
  episodes({ uid, episodes = [] }) {
    const lines = episodes.map((one, number) => make("li", {}, `${number}: ${one.phase}, ${short(one.tokens)} tokens${one.waits_for ? `; waits ${seconds(one.seconds)} for ${one.waits_for}` : ""}`));
    const toggled = (event) => { if (event.target.open) this.unfolded.add(uid); else this.unfolded.delete(uid); };
    return make("details", { open: this.unfolded.has(uid), ontoggle: toggled }, make("summary", {}, strip(Object.entries(count(episodes.map((one) => one.phase))))), make("ol", {}, ...lines));
  }

  groups(status) {
    const groups = status.groups ?? [];
    if (!groups.length) return [];
    const body = groups.slice(0, 100).map((one) => [
      make("code", {}, one.uid), one.task, one.born, one.tokens, this.episodes(one),
      slowest(one.episodes ?? []), seconds(one.seconds),
    ]);
    const rest = groups.length - body.length + (status.groups_left_out ?? 0);
    return [make("h2", {}, `Running groups, the most silent first${rest ? ` (${rest} more)` : ""}`), table(["group", "task", "admitted at", "tokens", "episodes", "slowest waits for", "silent"], body)];
  }
}

export class AdviceView {
  constructor(run) {
    this.run = run;
    this.node = make("div", { class: "advice wide" });
  }

  async opened() {
    const found = await api("advice", { run: this.run });
    this.node.replaceChildren(...(found.length ? found.map((one) => card(one, true)) : [make("p", { class: "empty" }, "Nothing stands out. Advice needs a few steps.")]));
  }

  async changed(names) { if (["metrics", "eval", "status", "timeline", "summary", "silent"].some((name) => names.has(name))) await this.opened(); }
}

// A finding with what to do about it, and the figures that it stands on.
export function card(advice, whole) {
  const figures = Object.entries(advice.figures).map(([name, value]) => make("span", {}, make("span", { class: "faint" }, `${name} `), make("b", {}, short(value))));
  const settings = advice.settings.map((name) => make("code", { class: "chip" }, name));
  return make("article", { class: `card ${advice.level}`, "data-rule": advice.rule }, make("b", {}, advice.title), make("p", {}, advice.text), advice.lines.length ? make("pre", { tabindex: "0" }, advice.lines.join("\n")) : null, whole ? make("p", { class: "figures" }, ...figures) : null, settings.length ? make("p", { class: "chips" }, ...settings) : null);
}

const count = (values) => values.reduce((found, value) => ({ ...found, [value]: (found[value] ?? 0) + 1 }), {});

function slowest(episodes) {
  const found = episodes.reduce((most, one) => (one.waits_for && one.seconds > (most?.seconds ?? -1) ? one : most), null);
  return found ? `${found.waits_for}, ${seconds(found.seconds)}` : "";
}

function strip(phases) {
  return make("span", { class: "strip" }, ...phases.map(([name, number]) => {
    const mark = make("i");
    mark.style.background = `var(--${name === "decode" ? "accent" : name})`;
    return make("span", {}, mark, `${name} ${number}`);
  }));
}

function meter(used, capacity) {
  if (!capacity) return "–";
  const bar = make("i", { class: used > 0.9 * capacity ? "full" : null });
  bar.style.width = `${Math.min(100, (100 * used) / capacity)}%`;
  return make("span", { class: "meter", title: `${short(used)} of ${short(capacity)} tokens` }, bar, make("span", {}, `${Math.round((100 * used) / capacity)} %`));
}

function table(head, body) {
  return make("div", { class: "scrolls" }, make("table", {}, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", {}, text)))), make("tbody", {}, ...body.map((cells) => make("tr", {}, ...cells.map((cell) => make("td", { class: typeof cell === "number" ? "number" : null }, typeof cell === "number" ? short(cell) : cell)))))));
}
