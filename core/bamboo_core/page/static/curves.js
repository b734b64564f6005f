// The curves over time or steps, all with the same axis; zoom, pan and selection by pointer and keyboard.

import { across, along, lane, plot, within } from "./charts.js";
import { byId, changed, clock, el, figure, loss, median, rate, sentenceOf, show } from "./dom.js";

const STEP = 0; // of a point in the document
const AT = 1;
const DRAG = 6; // pixels from which a press is a drag
const FINEST = 400; // the range in sight is at least 1 / FINEST of the whole
const CURVES = [
  { name: "loss", title: "Loss", unit: "loss", height: 150, word: loss, smooth: true },
  { name: "rate", title: "Throughput in samples a second", unit: "samples/s", height: 120, word: rate, smooth: true, zero: true },
  { name: "norm", title: "Gradient norm", unit: "gradient norm", height: 110, word: figure, smooth: true, zero: true, optional: true },
  { name: "learning", title: "Learning rate", unit: "learning rate", height: 100, word: figure, zero: true, optional: true },
];

let page = null; // the newest document
let kind = "time"; // of the axis
let view = null; // [first, last] in sight, in the axis' unit; null: everything
let drawn = null; // {axis, xs, series, marks, ups}: what the drawings show
let cursor = null; // the index of the selected point
let looked = null; // the plot under the pointer; null: all of them, with the keyboard
let drag = null; // {from, to}: pixels

const place = (name) => byId(`plot-${name}`);
const places = () => [...CURVES.map(({ name }) => place(name)), place("marks")];

// Returns samples per second at each point, over at least the usual time between two points, because steps that are
// reported at one moment took longer; null before that time has passed.
export function throughput(points, samples) {
  const usual = points.length > 1 ? median(points.slice(1).map(([, at], index) => at - points[index][AT])) : 0;
  return points.map(([step, at], index) => {
    if (!index || !samples || step <= points[index - 1][STEP]) return null; // the job went back to a checkpoint
    let first = index - 1;
    while (first && at - points[first][AT] < usual && points[first - 1][STEP] < points[first][STEP]) first -= 1;
    const [before, since] = points[first];
    return at > since && at - since >= usual ? ((step - before) * samples) / (at - since) : null;
  });
}

// Interpolates coordinate `to` of the curve where coordinate `from` has this value.
function read(points, from, to, value) {
  const next = points.findIndex((point) => point[from] >= value);
  if (next <= 0) return points[next ? points.length - 1 : 0][to];
  const [a, b] = [points[next - 1], points[next]];
  return b[from] > a[from] ? a[to] + ((value - a[from]) / (b[from] - a[from])) * (b[to] - a[to]) : b[to];
}

// Returns [first, last] of the whole axis.
function everything({ points, marks, now, state }) {
  if (kind === "step" && points.length) {
    const steps = points.map((point) => point[STEP]); // they fall when the job goes back to a checkpoint
    const first = steps.reduce((a, b) => Math.min(a, b));
    return [first, Math.max(steps.reduce((a, b) => Math.max(a, b)), first + 1)];
  }
  const first = Math.min(points.length ? points[0][AT] : now, marks.length ? marks[marks.length - 1].at : Infinity);
  const end = state.over || !points.length ? 0 : Math.floor(now);
  const last = Math.max(points.length ? points[points.length - 1][AT] : now, marks.length ? marks[0].at : 0, end);
  return [first, Math.max(last, first + 1)];
}

export function drawCurves(newest = page) {
  page = newest;
  const points = page.points;
  const all = everything(page);
  const [first, last] = view ?? all;
  const width = Math.max(200, place("loss").clientWidth);
  if (!changed("curves", points, page.marks, width, kind, first, last)) return;
  const axis = { kind, origin: all[0], first, last, width };
  const byStep = kind === "step" && points.length > 0;
  const xs = points.map((point) => point[byStep ? STEP : AT]);
  const marks = page.marks.map((mark) => ({ x: byStep ? read(points, AT, STEP, mark.at) : mark.at, kind: mark.kind, sentence: sentenceOf(mark), at: mark.at }));
  const [losses, norm, learning] = [0, 1, 2].map((number) => points.map(([, , figures]) => figures[number]));
  const series = { loss: losses, rate: throughput(points, page.job.samples), norm, learning };
  const ups = {};
  for (const curve of CURVES) {
    const values = series[curve.name];
    if (curve.optional && !show(place(curve.name).closest("figure"), values.some((value) => value !== null))) continue;
    ups[curve.name] = plot(place(curve.name), { ...curve, told: told(curve, points, values) }, axis, xs, values, marks);
  }
  lane(place("marks"), axis, marks);
  if (cursor !== null && cursor >= points.length) cursor = null;
  drawn = { axis, xs, series, marks, ups };
  byId("zoom-all").disabled = byId("zoom-out").disabled = view === null;
  overlay();
  table(points, series);
}

function told({ title, word }, points, values) {
  const known = values.map((value, index) => [value, points[index][STEP]]).filter(([value]) => value !== null);
  if (!known.length) return `${title}: no step yet`;
  const low = known.reduce((a, b) => (b[0] < a[0] ? b : a));
  const high = known.reduce((a, b) => (b[0] > a[0] ? b : a));
  const newest = known[known.length - 1];
  return `${title}: ${word(newest[0])} at step ${newest[1]}; lowest ${word(low[0])} at step ${low[1]}, highest ${word(high[0])} at step ${high[1]}`;
}

function table(points, series) {
  const most = 12;
  const { axis, xs } = drawn;
  const inSight = points.map((_, index) => index).filter((index) => xs[index] >= axis.first && xs[index] <= axis.last);
  const every = Math.max(1, Math.ceil(inSight.length / most));
  const chosen = inSight.filter((_, index) => (inSight.length - 1 - index) % every === 0);
  const values = (index) => CURVES.map(({ name, word }) => el("td", {}, word(series[name][index])));
  byId("curves-body").replaceChildren(...chosen.map((index) => el("tr", {}, el("th", { scope: "row" }, String(points[index][STEP])), el("td", {}, clock(points[index][AT])), ...values(index))));
}

// zoom and axis

function look(first, last) {
  const [low, high] = everything(page);
  const span = Math.min(Math.max(last - first, (high - low) / FINEST), high - low);
  const from = Math.min(Math.max(first, low), high - span);
  view = span >= (high - low) * 0.999 ? null : [from, from + span];
  drawCurves();
}

function zoom(factor) {
  const { axis, xs } = drawn;
  const middle = cursor === null ? (axis.first + axis.last) / 2 : xs[cursor];
  const share = (middle - axis.first) / (axis.last - axis.first);
  const span = (axis.last - axis.first) * factor;
  look(middle - share * span, middle + (1 - share) * span);
}

function showAll() {
  view = null;
  drawCurves();
}

function changeAxis(chosen) {
  if (view && page.points.length) view = view.map((x) => read(page.points, kind === "time" ? AT : STEP, chosen === "time" ? AT : STEP, x));
  if (view && view[0] >= view[1]) view = null;
  kind = chosen;
  drawCurves();
}

// pointer and selection

function overlay() {
  const { axis, xs, ups, series } = drawn;
  const x = cursor === null ? -9 : across(axis, xs[cursor]);
  const [from, to] = drag ? [Math.min(drag.from, drag.to), Math.max(drag.from, drag.to)] : [-9, -9];
  for (const spot of places()) {
    for (const [selector, values] of [[".pointer", { x1: x, x2: x }], [".selection", { x: from, width: to - from }], [".point", { cx: -9 }]]) {
      const shape = spot.querySelector(selector);
      for (const [name, value] of Object.entries(values)) shape?.setAttribute(name, value);
    }
    spot.querySelector(".tip").hidden = true;
  }
  if (cursor === null) return;
  for (const curve of CURVES.filter(({ name }) => ups[name] && (!looked || looked === place(name)))) {
    const value = series[curve.name][cursor];
    const point = place(curve.name).querySelector(".point");
    if (value !== null) for (const [name, position] of [["cx", x], ["cy", ups[curve.name](value)]]) point.setAttribute(name, position);
    tip(place(curve.name), x, `${curve.word(value)} ${curve.unit}`, whereabouts());
  }
  if (looked === place("marks")) {
    const near = drawn.marks.filter((mark) => Math.abs(across(axis, mark.x) - (drag ? drag.to : pointed)) < 9);
    if (near.length) tip(looked, across(axis, near[0].x), near[0].sentence, clock(near[0].at));
    else tip(looked, x, "", whereabouts());
  }
}

let pointed = 0; // the pointer's pixel

function whereabouts() {
  const [step, at] = page.points[cursor];
  return `step ${step}, ${clock(at)}`;
}

function tip(spot, x, value, where) {
  const note = spot.querySelector(".tip");
  note.replaceChildren(...(value ? [el("strong", {}, value), " "] : []), el("span", {}, where));
  note.hidden = false;
  const right = x > drawn.axis.width / 2;
  note.style.left = right ? "auto" : `${x + 8}px`;
  note.style.right = right ? `${drawn.axis.width - x + 8}px` : "auto";
}

function pointAt(spot, pixel) {
  if (!drawn || !drawn.xs.length) return;
  const at = along(drawn.axis, pixel);
  const inSight = drawn.xs.map((x, index) => [Math.abs(x - at), index]).filter(([, index]) => drawn.xs[index] >= drawn.axis.first && drawn.xs[index] <= drawn.axis.last);
  [looked, pointed] = [spot, pixel];
  cursor = inSight.length ? inSight.reduce((a, b) => (b[0] < a[0] ? b : a))[1] : null;
  overlay();
}

function leave() {
  [cursor, looked, drag] = [null, null, null];
  if (drawn) overlay();
}

function follow(spot) {
  const pixel = (event) => within(drawn.axis, event.clientX - spot.getBoundingClientRect().left);
  spot.addEventListener("pointermove", (event) => {
    if (!drawn) return;
    if (drag) drag.to = pixel(event);
    pointAt(spot, pixel(event));
  });
  spot.addEventListener("pointerdown", (event) => {
    if (!drawn || event.button !== 0) return;
    spot.setPointerCapture(event.pointerId);
    drag = { from: pixel(event), to: pixel(event) };
    pointAt(spot, pixel(event));
  });
  spot.addEventListener("pointerup", () => {
    const chosen = drag;
    drag = null;
    if (chosen && Math.abs(chosen.to - chosen.from) >= DRAG) look(...[chosen.from, chosen.to].sort((a, b) => a - b).map((x) => along(drawn.axis, x)));
    if (drawn) overlay();
  });
  spot.addEventListener("pointercancel", leave);
  spot.addEventListener("pointerleave", () => drag || leave());
  spot.addEventListener("dblclick", showAll);
}

// Moves the selection by points, at first to one at the edge, and the range in sight with it.
function move(by) {
  const { xs, axis } = drawn;
  const edge = by > 0 ? xs.findIndex((x) => x >= axis.first) : xs.findLastIndex((x) => x <= axis.last);
  moveTo(cursor === null ? edge : cursor + by);
}

function moveTo(index) {
  const { xs, axis } = drawn;
  if (!xs.length) return;
  [looked, cursor] = [null, Math.min(Math.max(index, 0), xs.length - 1)];
  const off = Math.min(xs[cursor] - axis.first, 0) + Math.max(xs[cursor] - axis.last, 0);
  if (off) look(axis.first + off, axis.last + off);
  overlay();
  const values = CURVES.filter(({ name }) => drawn.ups[name]).map(({ name, word, unit }) => `${unit} ${word(drawn.series[name][cursor])}`);
  byId("curves-said").textContent = `${whereabouts()}: ${values.join(", ")}`;
}

const KEYS = {
  ArrowLeft: (event) => move(event.shiftKey ? -10 : -1),
  ArrowRight: (event) => move(event.shiftKey ? 10 : 1),
  Home: () => moveTo(0),
  End: () => moveTo(Infinity),
  "+": () => zoom(0.5),
  "=": () => zoom(0.5),
  "-": () => zoom(2),
  0: showAll,
  Escape: () => (view ? showAll() : leave()),
};

export function watchCurves() {
  for (const spot of places()) {
    spot.append(el("div", { class: "tip", hidden: true, "aria-hidden": "true" }));
    follow(spot);
  }
  byId("plots").addEventListener("keydown", (event) => {
    if (!drawn || event.ctrlKey || event.metaKey || event.altKey || !(event.key in KEYS)) return;
    event.preventDefault();
    KEYS[event.key](event);
  });
  byId("plots").addEventListener("blur", leave);
  byId("zoom-in").addEventListener("click", () => drawn && zoom(0.5));
  byId("zoom-out").addEventListener("click", () => drawn && zoom(2));
  byId("zoom-all").addEventListener("click", () => drawn && showAll());
  for (const choice of document.querySelectorAll("input[name=axis]")) choice.addEventListener("change", () => page && changeAxis(choice.value));
  new ResizeObserver(() => page && drawCurves()).observe(place("loss"));
}
