import { INKS, make, short } from "./dom.js";
import { api, compared, differences, follow, go, state } from "./store.js";
import { Overview } from "./overview.js";
import { Episodes } from "./episodes.js";
import { Batches } from "./batches.js";
import { AdviceView, Fleet } from "./fleet.js";

const VIEWS = { overview: Overview, episodes: Episodes, batches: Batches, fleet: Fleet, advice: AdviceView };
const place = document.getElementById("view");
let runs = [];
let view = null;
let shown = "";

function showRuns() {
  const several = [state.run, ...compared()]; // the dots are then the colours of their lines
  const list = runs.map((run) => {
    const figures = make("span", { class: "faint" }, run.steps ? `${run.step} / ${run.steps}` : String(run.step), run.reward === null ? "" : ` · reward ${short(run.reward)}`);
    const button = make("button", { class: "run", "aria-current": run.name === state.run ? "true" : null, onclick: () => go({ run: run.name, with: "", step: "", uid: "", beside: "" }) },
      make("i", { class: `dot ${run.state}`, title: run.state }), make("span", { class: "name", title: run.name }, run.name), figures,
      run.differs.length ? make("span", { class: "differs", title: run.differs.map(([name, value]) => `${name}=${plain(value)}`).join("\n") }, differences.get(run.name)) : null);
    const box = make("input", { type: "checkbox", "aria-label": `compare ${run.name}`, title: "show beside the selected run", onchange: (event) => toggle(run.name, event.target.checked) });
    box.checked = run.name === state.run || compared().includes(run.name);
    box.disabled = run.name === state.run;
    const ink = several.indexOf(run.name);
    if (several.length > 1 && ink >= 0) button.querySelector(".dot").style.background = `var(${INKS[ink % INKS.length]})`;
    return make("div", { class: "entry" }, runs.length > 1 ? box : null, button);
  });
  document.getElementById("runs").replaceChildren(...list);
  const run = runs.find((one) => one.name === state.run);
  document.getElementById("title").textContent = run?.name ?? "";
  document.getElementById("state").textContent = run ? [run.title, differences.get(run.name), run.state, run.reason].filter(Boolean).join(" · ") : "";
  document.title = run ? `${run.name}: ${run.step}${run.steps ? "/" + run.steps : ""}` : "asyncrl";
}

const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));
// The last part of a setting's name says enough, unless two of them end alike.
function told(differs) {
  const last = (name) => name.split(".").at(-1);
  const ends = differs.map(([name]) => last(name));
  return differs.map(([name, value]) => `${ends.filter((one) => one === last(name)).length > 1 ? name : last(name)}=${plain(value)}`).join(", ");
}

function toggle(name, on) {
  const others = compared().filter((one) => one !== name);
  go({ with: (on ? [...others, name] : others).join("|") });
}

function showTabs() {
  const current = state.view in VIEWS ? state.view : "overview";
  const tabs = Object.keys(VIEWS).map((name) => make("button", { role: "tab", "aria-selected": String(name === current), onclick: () => go({ view: name }) }, name));
  document.getElementById("views").replaceChildren(...tabs);
  return current;
}

async function show() {
  const current = showTabs();
  showRuns();
  const key = [current, state.run, state.with].join("\n");
  if (!state.run) return place.replaceChildren(make("p", { class: "empty" }, "No run yet. It appears here as soon as it has written its settings."));
  if (key === shown) return view.moved?.();
  shown = key;
  view?.closed?.();
  const next = new VIEWS[current](state.run);
  view = next;
  place.replaceChildren(next.node);
  await next.opened();
}

async function listRuns() {
  runs = await api("runs");
  for (const run of runs) differences.set(run.name, told(run.differs));
  if (!runs.some((run) => run.name === state.run) && runs.length) {
    const newest = runs.reduce((best, run) => (run.written > best.written ? run : best));
    go({ run: newest.name }, true);
    await show();
  }
  showRuns();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches("input:not([type=checkbox]):not([type=radio]), select, textarea");
  if (event.key === "Escape") { document.activeElement.blur(); view.closePanel?.(); return; }
  if (typing) return;
  const names = Object.keys(VIEWS);
  if (event.key >= "1" && event.key <= String(names.length)) go({ view: names[event.key - 1] });
  else if (event.key === "/") { event.preventDefault(); document.querySelector("input[type=search]")?.focus(); }
  else view.key?.(event);
});

const failed = (error) => {
  if (view) place.querySelector(".failed")?.remove();
  place.prepend(make("p", { class: "failed", role: "alert" }, error.message ?? String(error)));
};
addEventListener("unhandledrejection", (event) => { event.preventDefault(); failed(event.reason); });
addEventListener("hashchange", () => show());

// Updates run one after another, so that a slow server is never asked twice for the same.
let waiting = null;
let busy = false;
async function update() {
  if (busy) return;
  busy = true;
  try {
    while (waiting) {
      const changes = waiting;
      waiting = null;
      if (["metrics", "summary", "config", "silent"].some((name) => [...changes.values()].some((names) => names.has(name)))) await listRuns();
      for (const [run, names] of changes) if (run === state.run || compared().includes(run)) await view?.changed(names, run);
    }
  } catch (error) {
    failed(error);
  } finally {
    busy = false;
  }
}

await listRuns();
await show();
follow((run, names) => {
  waiting ??= new Map();
  waiting.set(run, new Set([...(waiting.get(run) ?? []), ...names]));
  update();
}, (live) => {
  const mark = document.getElementById("live");
  mark.dataset.live = live;
  mark.querySelector("span").textContent = live ? "live" : "connection lost, trying again";
});
