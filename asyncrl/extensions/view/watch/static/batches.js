import { isDark, make, seconds, short, style, versionHue } from "./dom.js";
import { api, go, state } from "./store.js";

// The anatomy of a batch on a canvas: only the rows in view are drawn, so that their number does not matter.
// `intervals` holds 5 numbers for each interval: phase, start and end in milliseconds, version, name.
const FIELDS = 5;
const HEAD = 20;
const LOAD = 46;
const LANE = 15;
const SORTS = {
  "end": (batch, row) => row.end,
  "start": (batch, row) => row.start,
  "duration": (batch, row) => row.start - row.end,
  "reward": (batch, row) => -(row.reward ?? -1e9),
  "group": (batch, row) => row.group,
};

export class Batches {
  constructor(run) {
    this.run = run;
    this.rowHeight = 12;
    this.steps = [];
    this.asked = 0;
    this.step = make("select", { "aria-label": "batch", onchange: () => go({ step: this.step.value }) });
    this.sort = make("select", { "aria-label": "order", onchange: () => this.arrange() }, ...Object.keys(SORTS).map((name) => make("option", { value: name }, `by ${name}`)));
    this.told = make("span", { class: "faint" });
    this.late = make("button", { class: "straggler", hidden: true, title: "show its row", onclick: () => this.jump() });
    this.canvas = make("canvas", { role: "img", "aria-label": "episodes of the batch over time" });
    this.space = make("div", { class: "space" });
    this.tip = make("div", { class: "tip", hidden: true });
    this.scroller = make("div", { class: "anatomy", tabindex: "0", onscroll: () => this.paint(), onmousemove: (event) => this.point(event), onmouseleave: () => this.hide(), onclick: (event) => this.choose(event), ondblclick: () => this.zoom(0, this.batch?.end ?? 1) }, this.canvas, this.space);
    this.scroller.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.legend = make("p", { class: "legend" });
    this.empty = make("p", { class: "empty", hidden: true });
    const turn = (by, text, label) => make("button", { class: "quiet", "aria-label": label, onclick: () => this.turn(by) }, text);
    const grow = (by, text, label) => make("button", { class: "quiet", "aria-label": label, title: label, onclick: () => this.grow(by) }, text);
    this.node = make("div", { class: "batches" }, make("div", { class: "row" }, turn(-1, "←", "previous batch"), this.step, turn(1, "→", "next batch"), this.sort, grow(1 / 1.5, "−", "lower rows"), grow(1.5, "+", "higher rows"), this.told), this.late, this.legend, this.empty, this.scroller, this.tip);
    this.resized = new ResizeObserver(() => this.paint());
    this.theme = () => { this.inks = null; this.paint(); };
    this.media = matchMedia("(prefers-color-scheme: dark)");
  }

  async opened() {
    this.resized.observe(this.scroller);
    this.media.addEventListener("change", this.theme);
    await this.list();
    await this.show();
  }

  closed() {
    this.resized.disconnect();
    this.media.removeEventListener("change", this.theme);
  }

  async changed(names) {
    if (!names.has("timeline")) return;
    const newest = !state.step || state.step === String(this.steps.at(-1));
    await this.list();
    if (newest) { go({ step: "" }, true); await this.show(); }
  }

  async moved() { await this.show(); }

  async list() {
    const batches = await api("batches", { run: this.run });
    this.steps = batches.map((one) => one.step);
    this.step.replaceChildren(...batches.map((one) => make("option", { value: one.step }, `batch ${one.step}, waited ${seconds(one.waited)}`)).reverse());
    if (this.batch) this.step.value = this.batch.step;
  }

  async show() {
    const wanted = this.steps.includes(Number(state.step)) && state.step ? Number(state.step) : this.steps.at(-1);
    const none = wanted === undefined;
    this.empty.hidden = !none;
    this.scroller.hidden = none;
    if (none) { this.empty.textContent = "No batch has a timeline yet: they are recorded with timelines.record=true."; return; }
    this.step.value = wanted;
    const asked = ++this.asked;
    const batch = await api("anatomy", { run: this.run, step: wanted });
    if (asked !== this.asked) return; // another batch was chosen meanwhile
    this.batch = batch;
    this.batch.intervals = Int32Array.from(this.batch.intervals);
    this.rows = this.batch.episodes.map(([group, sibling, reward, tokens], number) => {
      const [from, to] = [this.batch.first[number], this.batch.first[number + 1] ?? this.batch.intervals.length / FIELDS];
      let end = 0;
      for (let at = from; at < to; at += 1) if (this.phase(at) !== "waiting") end = Math.max(end, this.batch.intervals[FIELDS * at + 2]);
      const start = to > from ? this.batch.intervals[FIELDS * from + 1] : this.batch.groups[group][2];
      return { group, sibling, reward, tokens, from, to, start, end };
    });
    this.from = 0;
    this.to = Math.max(1, this.batch.end);
    this.told.textContent = `${this.rows.length} episodes of ${this.batch.groups.length} groups over ${seconds(this.to / 1000)}; the trainer waited ${seconds((this.batch.taken - this.batch.asked) / 1000)}${this.batch.missing ? `; ${this.batch.missing} groups were not sampled` : ""}`;
    const late = this.batch.straggler;
    this.late.hidden = !late;
    this.late.classList.toggle("calm", Boolean(late) && late.waited < 0.05 * late.total);
    this.late.textContent = late ? `▸ last: ${late.text}` : "";
    this.explain();
    this.arrange();
  }

  phase(at) { return this.batch.phases[this.batch.intervals[FIELDS * at]]; }

  arrange() {
    const key = SORTS[this.sort.value];
    this.order = this.rows.map((_, at) => at).sort((one, other) => key(this.batch, this.rows[one]) - key(this.batch, this.rows[other]) || one - other);
    const late = this.batch.straggler;
    const place = late ? this.rows.findIndex((row) => row.sibling === late.episode && this.batch.groups[row.group][0] === late.uid) : -1;
    this.marked = place < 0 ? -1 : this.order.indexOf(place);
    this.paint();
  }

  explain() {
    const used = new Set();
    for (let at = 0; at < this.batch.intervals.length; at += FIELDS) used.add(this.batch.intervals[at]);
    const mark = (colour, text) => { const node = make("i"); node.style.background = colour; return make("span", {}, node, text); };
    const phases = this.batch.phases.filter((name, number) => used.has(number) && name !== "decode").map((name) => mark(`var(--${name})`, name));
    const versions = new Set();
    for (let at = 0; at < this.batch.intervals.length; at += FIELDS) if (this.batch.phases[this.batch.intervals[at]] === "decode") versions.add(this.batch.intervals[at + 3]);
    const decodes = [...versions].sort((one, other) => one - other).slice(-12).map((version) => mark(this.ofVersion(version), version < 0 ? "decode" : `decode v${version}`));
    this.legend.replaceChildren(...decodes, ...phases, make("span", { class: "faint" }, "shift + wheel zooms, a double click shows all, a click opens the episode"));
  }

  ofVersion(version) { return version < 0 ? style("--accent") : `hsl(${versionHue(version)} 52% ${isDark() ? 52 : 58}%)`; }

  ink(phase, version) {
    this.inks ??= new Map();
    const key = phase === "decode" ? `v${version}` : phase;
    if (!this.inks.has(key)) this.inks.set(key, phase === "decode" ? this.ofVersion(version) : style(`--${phase}`));
    return this.inks.get(key);
  }

  get headHeight() { return HEAD + LOAD + LANE * this.batch.lanes.length + 8; }
  x(moment) { return ((moment - this.from) / (this.to - this.from)) * this.width; }

  zoom(from, to) {
    if (!this.batch) return;
    const most = this.batch.end;
    const span = Math.min(most, Math.max(20, to - from));
    this.from = Math.max(0, Math.min(most - span, from));
    this.to = this.from + span;
    this.paint();
  }

  wheel(event) {
    if (!this.batch) return;
    const span = this.to - this.from;
    if (event.shiftKey || event.ctrlKey) {
      event.preventDefault();
      const at = this.from + (span * event.offsetX) / this.width;
      const factor = Math.exp((event.deltaY || event.deltaX) * 0.002);
      this.zoom(at - (at - this.from) * factor, at + (this.to - at) * factor);
    } else if (event.deltaX) {
      event.preventDefault();
      this.zoom(this.from + (event.deltaX / this.width) * span, this.to + (event.deltaX / this.width) * span);
    }
  }

  grow(by) { this.rowHeight = Math.max(2, Math.min(28, Math.round(this.rowHeight * by))); this.paint(); }
  turn(by) { const at = this.steps.indexOf(Number(this.step.value)) + by; if (at in this.steps) go({ step: this.steps[at] }); }
  jump() { if (this.marked >= 0) this.scroller.scrollTop = Math.max(0, this.marked * this.rowHeight - 80); }

  key(event) {
    if (event.key === "ArrowLeft") this.turn(-1);
    else if (event.key === "ArrowRight") this.turn(1);
    else if (event.key === "l") this.jump();
    else if (event.key === "+" || event.key === "-") this.grow(event.key === "+" ? 1.5 : 1 / 1.5);
  }

  paint() {
    if (this.due || !this.batch || this.scroller.hidden) return;
    this.due = requestAnimationFrame(() => { this.due = 0; this.draw(); });
  }

  draw() {
    const began = performance.now();
    const [width, height, ratio] = [this.scroller.clientWidth, this.scroller.clientHeight, devicePixelRatio];
    if (!width || !height) return;
    this.width = width;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    this.space.style.height = `${Math.max(0, this.headHeight + this.order.length * this.rowHeight - height)}px`;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.drawRows(context, height);
    this.drawHead(context);
    this.drawMoments(context, height);
    this.canvas.dataset.rows = this.drawn.join();
    this.canvas.drawn = { rows: this.drawn, milliseconds: performance.now() - began };
  }

  drawRows(context, height) {
    const top = this.headHeight;
    const first = Math.floor(this.scroller.scrollTop / this.rowHeight);
    const last = Math.min(this.order.length, first + Math.ceil((height - top) / this.rowHeight) + 1);
    const gap = this.rowHeight > 5 ? 1.5 : 0;
    for (let place = first; place < last; place += 1) {
      const row = this.rows[this.order[place]];
      const y = top + place * this.rowHeight - this.scroller.scrollTop;
      for (let at = row.from; at < row.to; at += 1) {
        const [, start, end, version] = this.batch.intervals.subarray(FIELDS * at, FIELDS * at + 4);
        if (end < this.from || start > this.to) continue;
        const x = this.x(start);
        context.fillStyle = this.ink(this.phase(at), version);
        context.fillRect(x, y, Math.max(0.6, this.x(end) - x), this.rowHeight - gap);
      }
      if (place === this.marked) {
        context.strokeStyle = style("--bad");
        context.lineWidth = 1.5;
        context.strokeRect(this.x(row.start) - 1, y - 1, this.x(row.end) - this.x(row.start) + 2, this.rowHeight);
      }
    }
    this.drawn = [first, last];
  }

  drawHead(context) {
    context.fillStyle = style("--card");
    context.fillRect(0, 0, this.width, this.headHeight - 2);
    context.font = "11px system-ui";
    context.textBaseline = "middle";
    this.drawTicks(context);
    const [prefill, decode] = this.batch.load;
    const most = Math.max(1, ...decode.map((value, at) => value + prefill[at]));
    const base = HEAD + LOAD - 4;
    for (const [values, below, colour] of [[decode, null, style("--accent")], [prefill, decode, style("--prefill")]]) {
      context.fillStyle = colour;
      context.globalAlpha = 0.55;
      values.forEach((value, at) => {
        const [x, next] = [this.x((at * this.batch.end) / values.length), this.x(((at + 1) * this.batch.end) / values.length)];
        const low = below ? below[at] : 0;
        const scaled = (LOAD - 8) / most;
        context.fillRect(x, base - (low + value) * scaled, next - x + 0.4, value * scaled);
      });
      context.globalAlpha = 1;
    }
    this.label(context, `engines: up to ${short(most)} requests in decode and prefill`, HEAD + 4);
    this.batch.lanes.forEach((lane, number) => this.drawLane(context, lane, HEAD + LOAD + number * LANE));
  }

  drawLane(context, lane, y) {
    for (const [name, start, end] of lane.spans) {
      if (end < this.from || start > this.to) continue;
      const x = this.x(start);
      context.fillStyle = style(LANES[name] ?? "--ink-6");
      context.fillRect(x, y + 1, Math.max(0.8, this.x(end) - x), LANE - 3);
    }
    this.label(context, lane.name, y + LANE / 2);
  }

  label(context, text, y) {
    context.fillStyle = style("--card");
    context.globalAlpha = 0.75;
    context.fillRect(2, y - 6, context.measureText(text).width + 8, 12);
    context.globalAlpha = 1;
    context.fillStyle = style("--ink");
    context.fillText(text, 6, y);
  }

  drawTicks(context) {
    const span = (this.to - this.from) / 1000;
    const unit = 10 ** Math.floor(Math.log10(span / 4));
    const each = [1, 2, 5, 10].map((by) => by * unit).find((by) => span / by <= 10);
    context.fillStyle = style("--faint");
    for (let at = Math.ceil(this.from / 1000 / each) * each; at * 1000 <= this.to; at += each) {
      context.fillText(`${+at.toPrecision(6)} s`, this.x(at * 1000) + 3, 9);
      context.fillRect(this.x(at * 1000), 0, 1, 16);
    }
  }

  // When the trainer asked and when it got the batch; when requests were held back for a publish.
  drawMoments(context, height) {
    context.globalAlpha = 0.16;
    context.fillStyle = style("--bad");
    for (const [, held, released] of this.batch.publishes) context.fillRect(this.x(held), HEAD, Math.max(1, this.x(released) - this.x(held)), height);
    context.globalAlpha = 1;
    const near = this.x(this.batch.taken) - this.x(this.batch.asked) < 64;
    for (const [moment, text] of [[this.batch.asked, near ? "" : "asked for"], [this.batch.taken, near ? "asked for and taken" : "taken"]]) {
      context.fillStyle = style("--ink");
      context.fillRect(this.x(moment), HEAD, 1, height);
      context.fillText(text, this.x(moment) + 4, HEAD + 16);
    }
  }

  rowAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const y = event.clientY - box.top - this.headHeight + this.scroller.scrollTop;
    return event.clientY - box.top < this.headHeight ? undefined : this.rows[this.order[Math.floor(y / this.rowHeight)]];
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const moment = this.from + ((event.clientX - box.left) / this.width) * (this.to - this.from);
    const text = this.inHead(event.clientY - box.top, moment) ?? this.inRow(this.rowAt(event), moment);
    if (!text) return this.hide();
    this.tip.hidden = false;
    this.tip.textContent = text;
    this.tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 360)}px`;
    this.tip.style.top = `${Math.min(event.clientY + 14, innerHeight - 90)}px`;
  }

  inHead(y, moment) {
    const lane = this.batch.lanes[Math.floor((y - HEAD - LOAD) / LANE)];
    if (y > this.headHeight || !lane) return undefined;
    const found = lane.spans.filter(([, start, end]) => start <= moment && moment <= end).at(-1);
    return found ? `${lane.name}: ${found[0]}, ${seconds((found[2] - found[1]) / 1000)}${found[3] >= 0 ? `, step ${found[3]}` : ""}` : undefined;
  }

  inRow(row, moment) {
    if (!row) return undefined;
    const [uid, task, , , born] = this.batch.groups[row.group];
    const lines = [`${uid}, episode ${row.sibling} (${task}), admitted at version ${born}: reward ${short(row.reward)}, ${row.tokens} tokens, ${seconds((row.end - row.start) / 1000)}`];
    for (let at = row.from; at < row.to; at += 1) {
      const [, start, end, version, name] = this.batch.intervals.subarray(FIELDS * at, FIELDS * at + FIELDS);
      if (start <= moment && moment <= end) lines.push(`${this.phase(at)} ${this.batch.names[name]}${version >= 0 ? ` v${version}` : ""}: ${seconds((end - start) / 1000)}`);
    }
    return lines.join("\n");
  }

  hide() { this.tip.hidden = true; }
  choose(event) { const row = this.rowAt(event); if (row) go({ view: "episodes", uid: this.batch.groups[row.group][0] }); }
}

const LANES = {
  wait_batch: "--waiting", forward: "--ink-1", backward: "--ink-4", optimizer: "--ink-3", gather: "--ink-2", publish: "--ink-5",
  publish_background: "--ink-5", checkpoint: "--teacher", restart: "--bad", recovery: "--bad", train: "--ink-1", communication: "--prefill", pause: "--bad",
};
