// DOM elements, icons and text formats. Everything that comes from a job is inserted as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function made(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== "" && child !== false));
  return node;
}

export const byId = (id) => document.getElementById(id);
export const el = (tag, attributes = {}, ...children) => made(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => made(document.createElementNS(SVG, tag), attributes, children);
export const unseen = (text) => el("span", { class: "unseen" }, text);

export function show(node, visible) {
  node.hidden = !visible;
  return visible;
}

// Returns whether the values under a key changed since the last call. Only changed pieces of the page are drawn anew,
// so that a reader's selection and position stay.
const drawn = new Map();
export function changed(key, ...values) {
  const now = JSON.stringify(values);
  if (drawn.get(key) === now) return false;
  drawn.set(key, now);
  return true;
}

const ICONS = {
  training: [["circle", { cx: 6, cy: 6, r: 4.5, fill: "currentColor" }]],
  standby: [["circle", { cx: 6, cy: 6, r: 3.7, fill: "none", stroke: "currentColor", "stroke-width": 1.8 }]],
  starting: [2.2, 6, 9.8].map((cx) => ["circle", { cx, cy: 6, r: 1.4, fill: "currentColor" }]),
  syncing: [["path", { d: "M6 1.500v7M2.800 5.700 6 9l3.200-3.300M2 11h8", fill: "none", stroke: "currentColor", "stroke-width": 1.7 }]],
  leaving: [["path", { d: "M1 6h8M6 2.500 9.500 6 6 9.500M11 1.500v9", fill: "none", stroke: "currentColor", "stroke-width": 1.7 }]],
  lost: [["path", { d: "M2 2l8 8M10 2l-8 8", fill: "none", stroke: "currentColor", "stroke-width": 2.2 }]],
  unknown: [["path", { d: "M3.500 4.300C3.500 1 8.500 1 8.500 4.100 8.500 6 6 6 6 8", fill: "none", stroke: "currentColor", "stroke-width": 1.7 }], ["circle", { cx: 6, cy: 10.6, r: 1.1, fill: "currentColor" }]],
  notice: [["path", { d: "M6 1 11.300 10.800H.7z", fill: "currentColor" }]],
  takeover: [["path", { d: "M1.500 3.500h6.500M6 1l2.800 2.500L6 6M10.500 8.500H4M6 6 3.200 8.500 6 11", fill: "none", stroke: "currentColor", "stroke-width": 1.6 }]],
  restore: [["path", { d: "M2.200 3.200A4.600 4.600 0 1 1 1.400 6.600M2 .700v2.900h2.900", fill: "none", stroke: "currentColor", "stroke-width": 1.7 }]],
  held: [["path", { d: "M6 .8 10.500 2.500v3.200c0 2.700-1.800 4.600-4.500 5.500C3.300 10.300 1.500 8.400 1.500 5.700V2.500z", fill: "currentColor" }]],
  bare: [["path", { d: "M6 1.500 9.900 3v2.700c0 2.300-1.500 3.900-3.900 4.700C3.600 9.600 2.100 8 2.100 5.700V3zM3 9.700 9 2.300", fill: "none", stroke: "currentColor", "stroke-width": 1.4 }]],
};
ICONS.loss = ICONS.lost;
ICONS.ended = ICONS.standby;

export function icon(name) {
  const shapes = (ICONS[name] || ICONS.unknown).map(([tag, attributes]) => svg(tag, attributes));
  return svg("svg", { class: "icon", viewBox: "0 0 12 12", "aria-hidden": "true", focusable: "false" }, ...shapes);
}

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const half = Math.floor(sorted.length / 2);
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

// text formats

export const dash = "–";

export function number(value, digits = 1) {
  if (value === null || value === undefined) return dash;
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export const loss = (value) => (value === null || value === undefined ? dash : value.toFixed(Math.abs(value) < 0.01 ? 6 : 4));

export function rate(value) {
  return number(value, value !== null && value !== undefined && value < 100 ? 1 : 0);
}

// Formats a number of any size with four significant digits.
export function figure(value) {
  if (value === null || value === undefined) return dash;
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return Number(value.toPrecision(4)).toExponential();
  return String(Number(value.toPrecision(4)));
}

export function milliseconds(value) {
  if (value === null || value === undefined) return dash;
  if (value >= 999.5) return `${number(value / 1000, value >= 99950 ? 0 : 2)} s`;
  return value >= 10 ? `${number(value, 0)} ms` : `${number(value, 1)} ms`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return dash;
  const whole = Math.max(0, Math.round(seconds));
  const [days, hours, minutes, rest] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60, whole % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  if (minutes >= 10) return `${minutes} min`;
  return minutes ? `${minutes} min ${rest} s` : `${rest} s`;
}

export function clock(at) {
  const time = new Date(at * 1000);
  const today = new Date().toDateString() === time.toDateString();
  const text = time.toLocaleTimeString("en-GB");
  return today ? text : `${time.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${text}`;
}

export function moment(at) {
  return el("time", { datetime: new Date(at * 1000).toISOString() }, clock(at));
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return unit ? `${number(value, value < 10 ? 1 : 0)} ${units[unit]}` : `${value} B`;
}

// Returns a worker's name without the job's name before it.
export const short = (worker) => worker.replace(/^.+-(?=w[0-9]+$)/, "");

// Returns the sentence of a mark of the timeline.
export function sentenceOf({ takeover: taken, message }) {
  return taken ? `${short(taken.worker)} took over stage ${taken.stage} of pipeline ${taken.pipeline} from ${short(taken.victim)}` : message;
}

export const plural = (count, noun) => `${number(count, 0)} ${noun}${count === 1 ? "" : "s"}`;
