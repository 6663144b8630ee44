import { make, short } from "./dom.js";
import { api, go, state } from "./store.js";
import { SCALES, paint, prompt, scale, trajectory } from "./tokens.js";

// Groups of the recording: a list that is filtered and paged by the server, and panels with the groups that were opened.
const TEXTS = [["text", "search prompts and answers"], ["reward", "reward 0.5:1"], ["length", "length 100:"], ["staleness", "staleness 2:"]];
const AT_ONCE = 4;
const COLOUR = "asyncrl-watch-colour";

export class Episodes {
  constructor(run) {
    this.run = run;
    this.inputs = Object.fromEntries(TEXTS.map(([name, hint]) => [name, this.input(name, hint)]));
    for (const name of ["step", "task", "reason"]) this.inputs[name] = make("select", { name, "aria-label": name, onchange: () => this.search() });
    this.colour = make("select", { "aria-label": "colour of tokens", onchange: () => this.recolour() }, ...Object.entries(SCALES).map(([name, one]) => make("option", { value: name }, `colour: ${one.title}`)));
    this.colour.value = localStorage.getItem(COLOUR) ?? "logprob";
    this.scale = make("span", { class: "scale" });
    this.told = make("p", { class: "faint told" });
    this.list = make("div", { class: "list", role: "listbox", "aria-label": "groups", tabindex: "0", onscroll: () => this.scrolled() });
    this.panels = make("div", { class: "panels" });
    const form = make("form", { class: "filters", onsubmit: (event) => { event.preventDefault(); this.search(); } }, ...Object.values(this.inputs), this.colour, this.scale);
    this.node = make("div", { class: "episodes" }, form, make("div", { class: "split" }, make("div", { class: "found" }, this.told, this.list), this.panels));
    this.rows = [];
    this.open = new Map();
    this.asked = 0;
  }

  input(name, hint) {
    let soon;
    const typed = () => { clearTimeout(soon); soon = setTimeout(() => this.search(), 250); };
    return make("input", { type: "search", name, placeholder: hint, "aria-label": hint, size: name === "text" ? 22 : 10, oninput: typed });
  }

  async opened() {
    this.recolour();
    if (!(await this.overview())) return;
    if (state.step) this.inputs.step.value = state.step;
    await this.search();
    if (!state.uid && this.rows.length) go({ uid: this.rows[0].uid }, true);
    await this.moved();
  }

  async changed(names) {
    if (!names.has("records")) return;
    if (!(await this.overview())) return;
    if (!this.list.scrollTop && !this.inputs.text.value) await this.search(true);
  }

  // The batches, tasks and reasons of the recording; false if there is none.
  async overview() {
    let told;
    try {
      told = await api("recording", { run: this.run });
    } catch (error) {
      this.told.textContent = error.message;
      return false;
    }
    const places = Object.entries(told.places).map(([place, count]) => [place, place === "trained" ? "" : place, `${place} (${count})`]);
    this.choices("step", told.steps.map((step) => [step, step, `batch ${step}`]).reverse(), "all batches");
    this.choices("task", told.tasks.map((task) => [task, task, task]), "all tasks");
    this.choices("reason", places.filter(([place]) => place !== "trained"), "trained or not");
    if (told.scanned < 1) setTimeout(() => this.node.isConnected && this.overview(), 100);
    return true;
  }

  choices(name, found, all) {
    const select = this.inputs[name];
    const [chosen, key] = [select.value, JSON.stringify(found)];
    if (select.dataset.key === key) return;
    select.dataset.key = key;
    select.replaceChildren(make("option", { value: "" }, all), ...found.map(([, value, text]) => make("option", { value }, text)));
    select.value = chosen;
  }

  get filter() {
    return Object.fromEntries(Object.entries(this.inputs).map(([name, input]) => [name, input.value]));
  }

  async search(quiet = false) {
    const asked = ++this.asked;
    const page = await api("groups", { run: this.run, ...this.filter, question: state.question });
    if (asked !== this.asked) return;
    this.rows = page.rows;
    this.cursor = page.cursor;
    if (!quiet) this.list.scrollTop = 0;
    this.list.replaceChildren(...page.rows.map((row) => this.entry(row)));
    this.tell(page.scanned);
    if (page.scanned < 1 || (page.cursor && this.rows.length < 50)) await this.more(asked);
  }

  // Searches go on in slices until the list is filled.
  async more(asked = this.asked) {
    if (!this.cursor || this.loading === asked || !this.node.isConnected) return;
    this.loading = asked;
    const wanted = this.rows.length + 50;
    try {
      while (this.cursor && this.rows.length < wanted && asked === this.asked && this.node.isConnected) {
        const page = await api("groups", { run: this.run, ...this.filter, question: state.question, cursor: this.cursor });
        if (asked !== this.asked) return;
        this.rows = this.rows.concat(page.rows);
        this.cursor = page.cursor;
        this.list.append(...page.rows.map((row) => this.entry(row)));
        this.tell(page.scanned);
      }
    } finally {
      if (this.loading === asked) this.loading = 0;
    }
  }

  scrolled() {
    if (this.list.scrollTop + this.list.clientHeight > this.list.scrollHeight - 300) this.more();
  }

  tell(scanned) {
    const more = this.cursor ? ", scroll for more" : "";
    const clear = state.question ? make("button", { class: "quiet", onclick: () => { go({ question: "" }, true); this.search(); } }, "× all questions") : "";
    this.told.replaceChildren(`${this.rows.length} groups${more}${scanned < 1 ? `; reading the recording, ${Math.round(100 * scanned)} %` : ""} `, clear);
  }

  entry(row) {
    const where = /^\d+$/.test(row.place) ? `batch ${row.place}` : row.place;
    const rewards = make("span", { class: "rewards", title: row.rewards.map(short).join("  ") }, ...row.rewards.map((reward) => bar(reward)));
    const node = make("button", { class: "group", role: "option", "data-uid": row.uid, "aria-selected": String(this.open.has(row.uid)), onclick: (event) => this.choose(row.uid, event.shiftKey || event.ctrlKey || event.metaKey) },
      make("code", {}, row.uid), make("span", { class: "faint" }, ` ${row.task} · ${where}`), rewards,
      make("span", { class: "faint" }, `reward ${short(mean(row.rewards))} · ${short(mean(row.lengths))} tokens${row.turns > 1 ? ` · ${row.turns} turns` : ""}${row.truncated ? ` · ${row.truncated} cut off` : ""}`));
    return node;
  }

  // With shift or control, a group is shown beside those that are open.
  choose(uid, beside) {
    const open = [...this.open.keys()];
    const next = beside ? (open.includes(uid) ? open.filter((one) => one !== uid) : [...open, uid]) : [uid];
    go({ uid: next.join("|") });
  }

  async moved() {
    const wanted = state.uid.split("|").filter(Boolean);
    for (const [uid, panel] of this.open) if (!wanted.includes(uid)) { panel.remove(); this.open.delete(uid); }
    for (const uid of wanted) if (!this.open.has(uid)) await this.show(uid);
    for (const node of this.list.children) node.setAttribute("aria-selected", String(this.open.has(node.dataset.uid)));
  }

  async show(uid) {
    const panel = make("section", { class: "panel", "data-uid": uid });
    this.open.set(uid, panel);
    this.panels.append(panel);
    const group = await api("group", { run: this.run, uid, count: AT_ONCE });
    const where = /^\d+$/.test(group.place) ? `batch ${group.place}` : group.place;
    const same = make("button", { class: "quiet", title: "groups with the same prompt", onclick: () => this.sameQuestion(group) }, "same question in other batches");
    panel.append(make("h3", {}, make("code", {}, uid), make("span", { class: "faint" }, ` ${group.task} · ${where} · advantage: ${group.estimator}`)), same,
      make("button", { class: "quiet", title: "close", "aria-label": `close ${uid}`, onclick: () => go({ uid: [...this.open.keys()].filter((one) => one !== uid).join("|") }) }, "×"),
      prompt(group, (name) => this.image(name)));
    this.siblings(panel, group, 0);
    for (let first = AT_ONCE; first < group.trajectories.length && panel.isConnected; first += AT_ONCE) {
      this.siblings(panel, await api("group", { run: this.run, uid, first, count: AT_ONCE }), first);
    }
  }

  image(name) { return `/api/image?${new URLSearchParams({ run: this.run, name })}`; }

  // Adds some of a group's answers. Those of a large group come one part after the other, so that the first appear soon.
  siblings(panel, group, first) {
    const found = group.trajectories.slice(first, first + AT_ONCE);
    panel.append(...found.map((one, number) => trajectory(one, first + number, (name) => this.image(name))));
    paint(panel, this.colour.value);
  }

  // Shows the same question as it was answered first and last, and all of its groups in the list.
  async sameQuestion(group) {
    for (const input of Object.values(this.inputs)) input.value = "";
    go({ question: group.question, step: "" }, true);
    const asked = { run: this.run, question: group.question, limit: 200 };
    let page = await api("groups", asked);
    const found = page.rows;
    while (page.cursor && this.node.isConnected) {
      page = await api("groups", { ...asked, cursor: page.cursor });
      found.push(...page.rows);
    }
    const batches = found.filter((row) => /^\d+$/.test(row.place)).sort((one, other) => one.place - other.place);
    if (batches.length > 1) go({ uid: `${batches[0].uid}|${batches.at(-1).uid}` });
    await this.search();
  }

  recolour() {
    localStorage.setItem(COLOUR, this.colour.value);
    this.scale.replaceChildren(...scale(this.colour.value));
    paint(this.panels, this.colour.value);
  }

  closePanel() { go({ uid: "" }); }

  key(event) {
    if (!["j", "k", "ArrowDown", "ArrowUp"].includes(event.key)) return;
    event.preventDefault();
    const uids = this.rows.map((row) => row.uid);
    const at = uids.indexOf([...this.open.keys()].at(-1));
    const next = uids[Math.max(0, Math.min(uids.length - 1, at + (["j", "ArrowDown"].includes(event.key) ? 1 : -1)))];
    if (!next) return;
    this.choose(next, event.shiftKey);
    this.list.querySelector(`[data-uid="${CSS.escape(next)}"]`)?.scrollIntoView({ block: "nearest" });
  }
}

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);

function bar(reward) {
  const node = make("i");
  node.style.height = `${Math.round(2 + 12 * Math.max(0, Math.min(1, reward)))}px`;
  if (reward < 0) node.className = "negative";
  return node;
}
