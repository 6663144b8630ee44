// What the page knows: the runs, which of them are shown, and the marks that the server sends when files change.

export const api = async (path, parameters = {}) => {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    for (const one of Array.isArray(value) ? value : [value]) if (one !== undefined && one !== null && one !== "") query.append(name, one);
  }
  const answer = await fetch(`/api/${path}?${query}`);
  if (answer.ok) return answer.json();
  const text = await answer.text();
  let told = text;
  try { told = JSON.parse(text).error; } catch { /* not JSON: shown as it is */ }
  throw new Error(told);
};

// The state of the page is its address: #view=episodes&run=NAME&uid=...
export const state = new Proxy({}, {
  get: (_, name) => new URLSearchParams(location.hash.slice(1)).get(name) ?? "",
  set: (_, name, value) => { go({ [name]: value }); return true; },
});

export function go(changes, replace = false) {
  const now = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of Object.entries(changes)) {
    if (value === "" || value === null || value === undefined) now.delete(name); else now.set(name, value);
  }
  if (now.toString() === location.hash.slice(1)) return;
  if (replace) { history.replaceState(null, "", "#" + now); return; }
  location.hash = now.toString();
}

// What distinguishes each run from the others of its folder, such as the runs of a sweep: "lr=1e-6, seed=2".
export const differences = new Map();
export const labelOf = (run) => (differences.get(run) ? `${run}: ${differences.get(run)}` : run);

export const compared = () => state.with.split("|").filter((name) => name && name !== state.run);

// Metrics of a run, which are fetched once and then continued.
export class Metrics {
  constructor(run) {
    this.run = run;
    this.columns = { step: [] };
    this.names = [];
    this.after = 0;
  }

  async fetch(fields) {
    const missing = fields.some((field) => !(field in this.columns));
    const wanted = [...new Set([...fields, ...Object.keys(this.columns)])];
    const after = missing ? 0 : this.after;
    const answer = await api("metrics", { run: this.run, fields: wanted.join(","), after });
    for (const [name, values] of Object.entries(answer.columns)) {
      this.columns[name] = after ? this.columns[name].concat(values) : values;
    }
    this.after = answer.after;
    if (answer.names.length) this.names = answer.names;
  }

  // The run was started again: its files begin anew.
  reset() { Object.assign(this, new Metrics(this.run)); }
}

const kept = new Map();
export function metricsOf(run) {
  if (!kept.has(run)) kept.set(run, new Metrics(run));
  return kept.get(run);
}

// Calls `changed(run, names)` with the names of the parts that have changed, and `live(whether)`. A hidden tab closes its
// connection, because browsers allow only few to one server.
export function follow(changed, live) {
  const marks = {};
  const told = (event) => {
    for (const [run, now] of Object.entries(JSON.parse(event.data))) {
      const before = marks[run] ?? {};
      const names = Object.keys(now).filter((name) => now[name] !== before[name]);
      if (before.metrics > now.metrics || (before.config && names.includes("config"))) metricsOf(run).reset();
      marks[run] = now;
      if (names.length) changed(run, new Set(names));
    }
  };
  let source = null;
  const connect = () => {
    source?.close();
    source = null;
    if (document.hidden) return;
    source = new EventSource("/api/events");
    source.onopen = () => live(true);
    source.onerror = () => live(false);
    source.onmessage = told;
  };
  document.addEventListener("visibilitychange", connect);
  connect();
}
