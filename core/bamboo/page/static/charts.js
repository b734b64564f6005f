// The curves over time, and beneath them what happened: three plots with one time axis.

import { byId, changed, clock, duration, el, icon, loss, rate, svg, unseen } from "./dom.js";

const LEFT = 52;
const RIGHT = 12;
const TOP = 8;
const BOTTOM = 20;
const SMOOTH = 40; // so many points make the curve a mean of three, twice as many of five; of nine at most

let shown = null; // what the plots show, for the pointer

export function throughput(points, samples) {
  return points.map(([step, at], index) => {
    if (!index || !samples) return null;
    const [before, since] = points[index - 1];
    return at > since ? ((step - before) * samples) / (at - since) : null;
  });
}

export function drawCourse(page) {
  const points = page.points;
  const width = Math.max(240, byId("plot-loss").clientWidth);
  const marks = page.marks.map(({ at, kind, takeover }) => ({ at, kind, pause: takeover && takeover.pause }));
  const end = page.state.over || !points.length ? 0 : Math.floor(page.now);
  if (!changed("course", points, marks, width, end)) return;
  const rates = throughput(points, page.progress.samples);
  const times = points.map((point) => point[1]);
  const first = Math.min(times[0] ?? page.now, marks.length ? marks[marks.length - 1].at : Infinity);
  const last = Math.max(times[times.length - 1] ?? page.now, marks.length ? marks[0].at : 0, end);
  const axis = { first, last: Math.max(last, first + 1), width };
  shown = { points, rates, axis };
  const losses = points.map((point) => point[2]);
  plot(byId("plot-loss"), { axis, times, values: losses, marks, height: 150, word: loss, kind: "loss", told: told("Loss", points, losses, loss) });
  plot(byId("plot-rate"), { axis, times, values: rates, marks, height: 120, word: rate, zero: true, kind: "rate", told: told("Throughput in samples a second", points, rates, rate) });
  markLane(byId("plot-marks"), axis, marks);
  table(points, rates);
}

function told(what, points, values, word) {
  const known = values.map((value, index) => [value, points[index][0]]).filter(([value]) => value !== null);
  if (!known.length) return `${what}: no step yet`;
  const low = known.reduce((a, b) => (b[0] < a[0] ? b : a));
  const high = known.reduce((a, b) => (b[0] > a[0] ? b : a));
  const newest = known[known.length - 1];
  return `${what}: ${word(newest[0])} at step ${newest[1]}; lowest ${word(low[0])} at step ${low[1]}, highest ${word(high[0])} at step ${high[1]}`;
}

function smoothed(values) {
  const beside = Math.min(4, Math.floor(values.length / SMOOTH));
  return values.map((value, index) => {
    const near = values.slice(Math.max(0, index - beside), index + beside + 1).filter((v) => v !== null);
    return value === null ? null : near.reduce((a, b) => a + b, 0) / near.length;
  });
}

const across = (axis, at) => LEFT + ((at - axis.first) / (axis.last - axis.first)) * (axis.width - LEFT - RIGHT);

function plot(place, { axis, times, values, marks, height, word, zero = false, kind, told }) {
  const known = values.filter((value) => value !== null);
  const picture = svg("svg", { width: axis.width, height, role: "img", "aria-label": told, class: kind });
  if (!known.length) {
    picture.append(svg("text", { x: axis.width / 2, y: height / 2, class: "none" }, "no step yet"));
    place.replaceChildren(picture);
    return;
  }
  const ticks = scale(zero ? 0 : Math.min(...known), Math.max(...known));
  const [low, high] = [ticks[0], ticks[ticks.length - 1]];
  const up = (value) => height - BOTTOM - ((value - low) / (high - low)) * (height - TOP - BOTTOM);
  for (const tick of ticks) {
    picture.append(svg("line", { x1: LEFT, x2: axis.width - RIGHT, y1: up(tick), y2: up(tick), class: "rule" }));
    picture.append(svg("text", { x: LEFT - 8, y: up(tick) + 4, class: "tick left" }, short(tick)));
  }
  timeAxis(picture, axis, height);
  for (const { at, kind: what } of marks) {
    picture.append(svg("line", { x1: across(axis, at), x2: across(axis, at), y1: TOP, y2: height - BOTTOM, class: `mark ${what}` }));
  }
  picture.append(svg("path", { d: path(times, values, axis, up), class: "raw" }));
  const bold = smoothed(values);
  picture.append(svg("path", { d: path(times, bold, axis, up), class: "curve" }));
  const newest = bold.findLastIndex((value) => value !== null);
  picture.append(svg("circle", { cx: across(axis, times[newest]), cy: up(bold[newest]), r: 3.5, class: "newest" }));
  picture.append(svg("line", { x1: -9, x2: -9, y1: TOP, y2: height - BOTTOM, class: "pointer" }));
  place.replaceChildren(picture);
}

function path(times, values, axis, up) {
  let pen = "M";
  const parts = [];
  values.forEach((value, index) => {
    if (value === null) {
      pen = "M";
      return;
    }
    parts.push(`${pen}${across(axis, times[index]).toFixed(1)} ${up(value).toFixed(1)}`);
    pen = "L";
  });
  return parts.join("");
}

function markLane(place, axis, marks) {
  const height = 56;
  const count = (kind) => marks.filter((mark) => mark.kind === kind).length;
  const told = `${count("loss")} losses, ${count("notice")} notices, ${count("takeover")} takeovers; the timeline has them one by one`;
  const picture = svg("svg", { width: axis.width, height, role: "img", "aria-label": told, class: "lane" });
  timeAxis(picture, axis, height);
  picture.append(svg("line", { x1: LEFT, x2: axis.width - RIGHT, y1: height - BOTTOM, y2: height - BOTTOM, class: "rule" }));
  const rows = { notice: 5, loss: 5, takeover: 20 };
  for (const { at, kind } of marks) {
    const drawing = icon(kind);
    for (const [name, value] of Object.entries({ x: across(axis, at) - 6.5, y: rows[kind], width: 13, height: 13 })) drawing.setAttribute(name, value);
    drawing.setAttribute("class", `sign ${kind}`);
    picture.append(drawing);
  }
  picture.append(svg("line", { x1: -9, x2: -9, y1: 0, y2: height - BOTTOM, class: "pointer" }));
  place.replaceChildren(picture);
}

function timeAxis(picture, axis, height) {
  const span = axis.last - axis.first;
  const steps = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const most = Math.max(2, Math.floor((axis.width - LEFT - RIGHT) / 76));
  const every = steps.find((step) => span / step <= most) ?? Math.ceil(span / most / 86400) * 86400;
  for (let since = 0; since <= span; since += every) {
    const x = across(axis, axis.first + since);
    const edge = axis.width - RIGHT - x < 24 ? "tick left" : "tick";
    picture.append(svg("text", { x: edge === "tick" ? x : axis.width - 2, y: height - 4, class: since ? edge : "tick start" }, since ? duration(since).replace(/ 0 (s|min|h)$/, "") : "start"));
  }
}

// Round numbers that span the values, three to five of them.
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

const short = (value) => (Math.abs(value) >= 10000 ? value.toLocaleString("en", { notation: "compact" }) : String(Number(value.toPrecision(4))));

function table(points, rates) {
  const most = 12;
  const every = Math.max(1, Math.ceil(points.length / most));
  const chosen = points.map((_, index) => index).filter((index) => (points.length - 1 - index) % every === 0);
  byId("course-body").replaceChildren(
    ...chosen.map((index) => {
      const [step, at, value] = points[index];
      return el("tr", {}, el("th", { scope: "row" }, String(step)), el("td", {}, clock(at)), el("td", {}, loss(value)), el("td", {}, rate(rates[index])));
    }),
  );
}

// The pointer's readout; the table is there for those who use none.
export function followPointer() {
  const course = byId("course");
  const readout = byId("readout");
  const move = (x) => {
    for (const line of course.querySelectorAll(".pointer")) {
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
    }
  };
  for (const place of course.querySelectorAll(".plot")) {
    place.addEventListener("pointermove", (event) => {
      if (!shown || !shown.points.length) return;
      const { axis, points, rates } = shown;
      const at = axis.first + ((event.clientX - place.getBoundingClientRect().left - LEFT) / (axis.width - LEFT - RIGHT)) * (axis.last - axis.first);
      let best = 0;
      points.forEach((point, index) => {
        if (Math.abs(point[1] - at) < Math.abs(points[best][1] - at)) best = index;
      });
      const [step, time, value] = points[best];
      move(across(axis, time));
      readout.textContent = `step ${step}, ${clock(time)}: loss ${loss(value)}, ${rate(rates[best])} samples/s`;
    });
    place.addEventListener("pointerleave", () => {
      move(-9);
      readout.textContent = "";
    });
  }
}

// A bar of parts in proportion: {name, value, word}. most: the value of a full bar.
export function bar(parts, most) {
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  const whole = el("span", { class: "bar", "aria-hidden": "true" });
  for (const { name, value } of parts) {
    const piece = el("span", { class: `piece ${name}` });
    piece.style.width = `${most > 0 ? Math.max(value > 0 ? 0.5 : 0, (100 * value) / most) : 0}%`;
    whole.append(piece);
  }
  return [whole, unseen(parts.map(({ name, word }) => `${name} ${word}`).join(", ") + (total ? "" : ", nothing"))];
}
