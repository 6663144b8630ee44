import { INKS, make, short, style } from "./dom.js";

// A figure with a caption, the values under the cursor, and a uPlot chart. Cursors of all charts move together.
const HEIGHT = 128;
const WHOLE = [1, 10, 100, 1000, 1e4, 1e5, 1e6].flatMap((unit) => [unit, 2 * unit, 5 * unit]);
const known = new Set();
const resized = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) target.chart?.setSize({ width: Math.max(80, contentRect.width), height: HEIGHT });
});

export class Chart {
  constructor(title, labels, options = {}) {
    this.labels = labels;
    this.options = options;
    this.told = make("output");
    this.box = make("div", { class: "plot" });
    this.node = make("figure", { "data-chart": title }, make("figcaption", {}, make("b", {}, title), this.told), this.box);
    known.add(this);
  }

  // data: [xs, ys of the first label, ...]; a missing value is null
  show(data) {
    this.data = data;
    if (!this.box.chart) {
      if (!this.node.isConnected) return requestAnimationFrame(() => this.node.isConnected && this.show(this.data));
      this.box.chart = new uPlot(this.settings(), data, this.box);
      resized.observe(this.box);
    } else {
      this.box.chart.setData(data);
    }
    this.tell(null);
  }

  settings() {
    const axis = { stroke: style("--faint"), grid: { stroke: style("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    return {
      width: Math.max(80, this.box.clientWidth),
      height: HEIGHT,
      padding: [8, 8, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "steps" }, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (_, low, high) => this.range(low, high) } },
      axes: [{ ...axis, size: 24, space: 60, incrs: WHOLE }, { ...axis, size: 46, space: 28, values: (_, values) => values.map(short) }],
      series: [{}, ...this.labels.map((_, number) => this.series(number))],
      hooks: { setCursor: [(chart) => this.tell(chart.cursor.idx)] },
    };
  }

  range(low, high) {
    if (low === null || low === undefined) return [0, 1];
    const least = this.options.fromZero === false ? low : Math.min(0, low);
    const most = Math.max(high, least + 1e-9);
    return [least, most + 0.06 * (most - least)];
  }

  series(number) {
    const ink = style(INKS[number % INKS.length]);
    const points = (chart) => chart.data[0].length < 40;
    return { stroke: ink, width: 1.6, spanGaps: true, points: { show: points, size: 4, fill: ink, stroke: ink } };
  }

  tell(place) {
    const [xs, ...columns] = this.data;
    const at = place ?? xs.length - 1;
    const parts = columns.map((values, number) => {
      let found = at;
      while (found > 0 && (values[found] === null || values[found] === undefined)) found -= 1;
      const mark = make("i", { class: "key" });
      mark.style.background = style(INKS[number % INKS.length]);
      mark.title = this.labels[number];
      const label = columns.length > 1 && !this.options.unnamed ? ` ${this.labels[number]} ` : " ";
      return make("span", {}, columns.length > 1 ? mark : null, label, make("b", {}, short(values[found])));
    });
    this.told.replaceChildren(...parts, place === null || place === undefined ? "" : make("span", { class: "faint" }, ` at ${xs[at]}`));
  }

  remake() {
    this.box.chart?.destroy();
    this.box.chart = undefined;
    if (this.data && this.node.isConnected) this.show(this.data);
  }

  remove() {
    known.delete(this);
    this.box.chart?.destroy();
    this.node.remove();
  }
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => known.forEach((chart) => chart.remake()));
