// Elements, numbers and colours, for the live page and for the page of a single file. All text becomes text nodes.

const SVG = ["svg", "path", "text", "circle", "rect", "line"];

export function make(name, attributes = {}, ...children) {
  const node = SVG.includes(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Math.abs(value) >= 1e6) return (value / 1e6).toPrecision(3) + " M";
  return Math.abs(value) >= 1000 ? value.toFixed(0) : String(+value.toPrecision(3));
}

export const seconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  return value < 7200 ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s` : `${(value / 3600).toFixed(1)} h`;
};

export const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
// Versions have cold colours, so that tools and errors, which are warm, stand out among them.
const COLD = [212, 172, 262, 194, 288, 236];
export const versionHue = (version) => COLD[((version % COLD.length) + COLD.length) % COLD.length];
export const INKS = ["--ink-1", "--ink-2", "--ink-3", "--ink-4", "--ink-5", "--ink-6"];
