// SVG charts over one horizontal axis: a curve, and a lane of icons for events.
//
// An axis is {kind, origin, first, last, width}: time in Unix seconds or steps, from first to last in the drawing's width
// in pixels; times are labelled as seconds since origin.

import { duration, el, icon, median, number, svg, unseen } from "./dom.js";

const LEFT = 52;
const RIGHT = 12;
const TOP = 8;
const BOTTOM = 20;
const SMOOTH = 40; // points from which the curve is a mean of three, with twice as many of five; of nine at most
const APART = 28; // pixels for each mark in sight; with less, marks are short lines at the foot that leave the curve free
const SHORT = 7;
const NEAR = 2; // points on both sides, of which the median says where the curve is, whatever a single point does
const FAR = 4; // a value farther from the medians than this many times their range does not count for the vertical axis
const LABEL = 76; // pixels that a label of the axis takes
const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400];

export const across = (axis, x) => LEFT + ((x - axis.first) / (axis.last - axis.first)) * (axis.width - LEFT - RIGHT);
export const along = (axis, pixel) => axis.first + ((pixel - LEFT) / (axis.width - LEFT - RIGHT)) * (axis.last - axis.first);
export const within = (axis, pixel) => Math.min(Math.max(pixel, LEFT), axis.width - RIGHT);

// Draws values over xs. Returns a function from a value to its y in pixels; null if there is nothing to draw.
// curve: {name, height, zero: the scale begins at 0, smooth, told: a sentence that describes the drawing}.
export function plot(place, curve, axis, xs, values, marks) {
  const { height } = curve;
  const picture = svg("svg", { width: axis.width, height, role: "img", "aria-label": curve.told, class: curve.name });
  replace(place, picture);
  const shown = values.filter((value, index) => value !== null && nearby(axis, xs, index));
  if (!shown.length) {
    picture.append(svg("text", { x: axis.width / 2, y: height / 2, class: "none" }, values.some((value) => value !== null) ? "nothing here" : "no step yet"));
    return null;
  }
  const spanned = withoutPeaks(shown, curve.zero);
  const ticks = scale(curve.zero ? 0 : Math.min(...spanned), Math.max(...spanned));
  const [low, high] = [ticks[0], ticks[ticks.length - 1]];
  const up = (value) => Math.min(Math.max(height - BOTTOM - ((value - low) / (high - low)) * (height - TOP - BOTTOM), 0), height - BOTTOM);
  for (const tick of ticks) {
    picture.append(svg("line", { x1: LEFT, x2: axis.width - RIGHT, y1: up(tick), y2: up(tick), class: "rule" }));
    picture.append(svg("text", { x: LEFT - 8, y: up(tick) + 4, class: "tick left" }, short(tick)));
  }
  labels(picture, axis, height);
  const clip = `clip-${curve.name}`;
  const box = svg("rect", { x: LEFT - 4, y: 0, width: Math.max(1, axis.width - LEFT - RIGHT + 8), height });
  const inside = svg("g", { "clip-path": `url(#${clip})` });
  picture.append(svg("clipPath", { id: clip }, box), inside);
  const seen = marks.filter(({ x }) => x >= axis.first && x <= axis.last);
  const brief = seen.length > (axis.width - LEFT - RIGHT) / APART;
  for (const { x, kind } of seen) {
    inside.append(svg("line", { x1: across(axis, x), x2: across(axis, x), y1: brief ? height - BOTTOM - SHORT : TOP, y2: height - BOTTOM, class: `mark ${kind}${brief ? " short" : ""}` }));
  }
  const bold = curve.smooth ? smoothed(values) : values;
  if (curve.smooth) inside.append(svg("path", { d: path(xs, values, axis, up), class: "raw" }));
  inside.append(svg("path", { d: path(xs, bold, axis, up), class: "curve" }));
  const newest = bold.findLastIndex((value) => value !== null);
  inside.append(svg("circle", { cx: across(axis, xs[newest]), cy: up(bold[newest]), r: 3.5, class: "newest" }));
  const highest = Math.max(...shown);
  if (highest > high) picture.append(svg("text", { x: axis.width - RIGHT, y: TOP + 4, class: "left beyond" }, `up to ${short(highest)}`));
  overlays(picture, height);
  return up;
}

export function lane(place, axis, marks) {
  const height = 56;
  const count = (kind) => marks.filter((mark) => mark.kind === kind).length;
  const told = `${count("loss")} losses, ${count("notice")} notices, ${count("takeover")} takeovers, ${count("restore")} restores; the timeline has them one by one`;
  const picture = svg("svg", { width: axis.width, height, role: "img", "aria-label": told, class: "lane" });
  labels(picture, axis, height);
  picture.append(svg("line", { x1: LEFT, x2: axis.width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM, class: "rule" }));
  const rows = { notice: 5, loss: 5, takeover: 20, restore: 20 };
  for (const { x, kind } of marks.filter((mark) => mark.x >= axis.first && mark.x <= axis.last)) {
    const drawing = icon(kind);
    for (const [name, value] of Object.entries({ x: across(axis, x) - 6.5, y: rows[kind], width: 13, height: 13 })) drawing.setAttribute(name, value);
    drawing.setAttribute("class", `sign ${kind}`);
    picture.append(drawing);
  }
  overlays(picture, height);
  replace(place, picture);
}

function replace(place, picture) {
  place.querySelector("svg")?.remove();
  place.prepend(picture);
}

// Adds the shapes that follow the pointer, out of sight until then.
function overlays(picture, height) {
  picture.append(
    svg("rect", { x: -9, y: TOP, width: 0, height: height - BOTTOM - TOP, class: "selection" }),
    svg("line", { x1: -9, x2: -9, y1: TOP, y2: height - BOTTOM, class: "pointer" }),
    svg("circle", { cx: -9, cy: 0, r: 4, class: "point" }),
  );
}

// Returns whether a point is in sight, or is the nearest one on either side, to which the curve leads.
function nearby(axis, xs, index) {
  return (xs[index + 1] ?? xs[index]) >= axis.first && (xs[index - 1] ?? xs[index]) <= axis.last;
}

// Returns the values without outliers, which are far from all values near them and would flatten the rest. The
// first and the newest value of a curve whose scale does not begin at 0, the loss, count as they are.
function withoutPeaks(shown, zero) {
  const inner = (index) => zero || (index && index < shown.length - 1);
  const medians = shown.map((value, index) => (inner(index) ? median(shown.slice(Math.max(0, index - NEAR), index + NEAR + 1)) : value));
  const [low, high] = [zero ? 0 : Math.min(...medians), Math.max(...medians)];
  const far = FAR * (high - low || Math.abs(high) || 1);
  return shown.filter((value) => value >= low - far && value <= high + far);
}

function smoothed(values) {
  const beside = Math.min(4, Math.floor(values.length / SMOOTH));
  return values.map((value, index) => {
    const near = values.slice(Math.max(0, index - beside), index + beside + 1).filter((v) => v !== null);
    return value === null ? null : near.reduce((a, b) => a + b, 0) / near.length;
  });
}

function path(xs, values, axis, up) {
  let pen = "M";
  const parts = [];
  values.forEach((value, index) => {
    if (value === null) {
      pen = "M";
      return;
    }
    if (index && xs[index] < xs[index - 1]) pen = "M"; // the job went back to a checkpoint
    parts.push(`${pen}${across(axis, xs[index]).toFixed(1)} ${up(value).toFixed(1)}`);
    pen = "L";
  });
  return parts.join("");
}

function labels(picture, axis, height) {
  const span = axis.last - axis.first;
  const most = Math.max(2, Math.floor((axis.width - LEFT - RIGHT) / LABEL));
  const every = axis.kind === "step" ? Math.max(1, round(span / most)) : SECONDS.find((step) => span / step <= most) ?? Math.ceil(span / most / 86400) * 86400;
  const origin = axis.kind === "step" ? 0 : axis.origin;
  for (let tick = Math.ceil((axis.first - origin) / every - 1e-9); origin + tick * every <= axis.last + every * 1e-9; tick += 1) {
    const x = across(axis, origin + tick * every);
    const edge = axis.width - RIGHT - x < 24;
    const side = edge ? "tick along left" : x - LEFT < 4 ? "tick along start" : "tick along";
    picture.append(svg("text", { x: edge ? axis.width - 2 : x, y: height - 4, class: side }, axis.kind === "step" ? number(tick * every, 0) : elapsed(tick * every, every)));
  }
}

// Formats seconds since the start, in words if they are exact enough for a label every `every` seconds.
function elapsed(since, every) {
  if (!since) return "start";
  if (every < 1) return `${number(since, 1)} s`;
  if ((since < 600 || every >= 60) && (since < 86400 || every >= 3600)) return duration(since).replace(/ 0 (s|min|h)$/, "");
  const pair = (value) => String(value).padStart(2, "0");
  return `${Math.floor(since / 3600)}:${pair(Math.floor(since / 60) % 60)}:${pair(since % 60)}`;
}

// Rounds up to the next of 1, 2, 5, 10, 20 …
function round(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999999);
}

// Returns three to five round numbers that span the values: the ticks of the vertical axis.
function scale(low, high) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const unit = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough);
  const start = Math.floor(low / unit) * unit;
  const ticks = [];
  for (let tick = start; tick < high + unit * 0.999; tick += unit) ticks.push(Number(tick.toPrecision(12)));
  return ticks.length > 1 ? ticks : [start, start + unit];
}

function short(value) {
  if (Math.abs(value) >= 10000) return value.toLocaleString("en", { notation: "compact" });
  const text = String(Number(value.toPrecision(4)));
  return text.length > 6 ? value.toExponential().replace(/(\.\d\d)\d+/, "$1") : text;
}

// Returns a stacked bar of parts {name, value, word}, and its text for screen readers. most: the value of a full bar.
export function bar(parts, most) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  const whole = el("span", { class: "bar", "aria-hidden": "true" });
  for (const { name, value } of parts) {
    const piece = el("span", { class: "piece", "data-part": name });
    piece.style.width = `${most > 0 ? Math.max(value > 0 ? 0.5 : 0, (100 * value) / most) : 0}%`;
    whole.append(piece);
  }
  return [whole, unseen(parts.map(({ name, word }) => `${name} ${word}`).join(", ") + (total ? "" : ", nothing"))];
}
