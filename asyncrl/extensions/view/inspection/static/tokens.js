import { make, short, versionHue } from "./dom.js";

// Trajectories token by token. A token is [text, log-probability, gap or null, version, whether the version is inferred].
const shade = (share, hue) => (share <= 0.02 ? "" : `hsl(${hue} 85% 52% / ${(0.08 + 0.5 * Math.min(1, share)).toFixed(3)})`);
const UNKNOWN = "repeating-linear-gradient(45deg, var(--line) 0 3px, transparent 3px 6px)";
export const SCALES = {
  logprob: { title: "surprise", marks: [[0, "sure"], [-1, "−1"], [-3, "−3"], [-6, "−6 nats"]], of: (token) => shade(-token[1] / 6, 8) },
  gap: {
    title: "gap",
    marks: [[-1, "−1: less likely to the trainer"], [-0.2, "−0.2"], [0, "0"], [0.2, "+0.2"], [1, "+1 nat"]],
    of: (token) => (token[2] === null ? UNKNOWN : shade(Math.abs(token[2]) ** 0.5, token[2] < 0 ? 8 : 215)),
  },
  version: { title: "version", marks: [], of: (token) => `hsl(${versionHue(token[3])} 65% 55% / .28)` },
  advantage: {
    title: "advantage",
    marks: [[-2, "−2"], [-0.5, "−0.5"], [0, "0"], [0.5, "+0.5"], [2, "+2"]],
    of: (token, advantage) => shade(Math.abs(advantage) / 2, advantage < 0 ? 8 : 140),
  },
};

export function paint(root, colour) {
  for (const node of root.querySelectorAll(".token")) {
    node.style.background = SCALES[colour].of(node.told, node.advantage);
  }
}

export function scale(colour) {
  return SCALES[colour].marks.map(([value, text]) => {
    const mark = make("span", {}, text);
    mark.style.background = SCALES[colour].of(["", value, value, 0], value);
    return mark;
  });
}

function tokens(turn, advantage) {
  const line = make("span");
  let version = null;
  for (const told of turn.tokens) {
    if (told[3] !== version) {
      version = told[3];
      line.append(make("span", { class: "version", title: told[4] ? "inferred: its stream broke" : "told by the engine" }, `⟨v${version}${told[4] ? "?" : ""}⟩`));
    }
    const gap = told[2] === null ? "not run by the trainer" : `gap ${told[2]}`;
    const node = make("span", { class: "token", title: `log-probability ${told[1]}, ${gap}, version ${told[3]}, advantage ${short(advantage)}` }, told[0]);
    node.told = told;
    node.advantage = advantage;
    line.append(node);
  }
  line.append(make("span", { class: "end" }, `⟨${turn.reason}⟩`));
  return line;
}

// `source` maps the name of an image to its address.
export function pictures(names, source) {
  return names.map((name) => {
    const picture = make("img", { title: name, alt: "image " + name.slice(0, 8), loading: "lazy" });
    picture.src = source(name);
    return picture;
  });
}

export function trajectory(one, number, source) {
  const age = one.staleness === null ? "" : `, staleness ${one.staleness}`;
  const told = make("p", { class: "told" }, make("b", {}, String(number)), ` reward ${short(one.reward)}, advantage ${short(one.advantage)}, ${one.length} tokens${age}`);
  const text = make("div", { class: "tokens" });
  for (const turn of one.turns ?? []) {
    if (turn.heading) text.append(make("span", { class: "end" }, turn.heading));
    if (turn.observation) text.append(make("span", { class: "observation" }, turn.observation));
    text.append(...pictures(turn.images, source), tokens(turn, one.advantage));
    if (turn.reward) text.append(make("span", { class: "end" }, `⟨turn's reward ${short(turn.reward)}⟩`));
  }
  return make("article", { class: "trajectory" }, told, text);
}

// The question stands at the end of a prompt with examples, so that the end is shown.
export function prompt(group, source) {
  const text = make("div", { class: "prompt", tabindex: "0" }, group.prompt);
  requestAnimationFrame(() => { text.scrollTop = text.scrollHeight; });
  return make("div", {}, text, ...pictures(group.images, source));
}
